// A block of threads of a kernel that meets those of other ranks (pull_meeting.h).
#pragma once

#include <cuda_runtime.h>

#include "cuda/pull.h"

namespace ringlet::cuda {

constexpr unsigned kWarp = 32;
constexpr int kPullThreads = 512;  // of a block
// Of a wait, from one look at the clock and at whether the rank has failed to the next.
constexpr unsigned kTurnsPerLook = 32;
static_assert(kMostTogether * kWarp <= kPullThreads && kMostRanks <= kWarp);

/// A block of threads. One of them speaks for all; barriers carry what it saw to the others (PTX memory model,
/// causality through bar.sync).
struct DeviceBlock {
  PullShared& memory;

  __device__ int index() const { return static_cast<int>(blockIdx.x); }
  __device__ PullShared& shared() const { return memory; }
  __device__ void together() { __syncthreads(); }

  template <class Act>
  __device__ void one(Act act) {
    if (threadIdx.x == 0) act();
  }
  template <class Act>
  __device__ void each(Act act) {
    act(size_t{threadIdx.x}, size_t{kPullThreads});
  }
  /// Each of `count` acts by a warp.
  template <class Act>
  __device__ void lanes(int count, Act act) {
    const auto k = static_cast<int>(threadIdx.x / kWarp);
    if (k < count) act(k, static_cast<int>(threadIdx.x % kWarp), static_cast<int>(kWarp));
  }
  __device__ static void warp() { __syncwarp(); }
  __device__ static bool all_lanes(bool mine) { return __all_sync(~0u, mine) != 0; }
  /// Each of `count` acts by as many whole warps as there are for it.
  template <class Act>
  __device__ void split(unsigned count, Act act) {
    const unsigned team = kPullThreads / kWarp / count * kWarp, k = threadIdx.x / team;
    if (k < count) act(static_cast<int>(k), size_t{threadIdx.x % team}, size_t{team});
  }
  __device__ bool any(bool mine) { return __syncthreads_or(mine) != 0; }

  __device__ static uint64_t load(const uint64_t* word) {
    uint64_t value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
    return value;
  }
  /// Orders nothing.
  __device__ static uint64_t peek(const uint64_t* word) {
    uint64_t value;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
    return value;
  }
  __device__ static void fence() { __threadfence_system(); }
  __device__ static void store(uint64_t* word, uint64_t value) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
  }
  /// The first to write a word that is 0.
  __device__ static bool claim(uint64_t* word, uint64_t value) {
    return atomicCAS(reinterpret_cast<unsigned long long*>(word), 0ull, value) == 0;
  }
  /// To `count` words, each by a thread of its own.
  template <class Words>
  __device__ void publish(int count, Words words, uint64_t value) {
    __syncthreads();  // all threads' stores come before
    const auto k = static_cast<int>(threadIdx.x);
    if (k < count) store(words(k), value);
  }
  __device__ static uint64_t nanoseconds() {
    uint64_t now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
  }

  /// Each of `count` waits by a thread of its own; false on all threads where one is over, or a peer calls something
  /// else.
  template <class Waits>
  __device__ bool wait(int count, Waits waits, const PullWatch& watch) {
    bool bad = false;
    const auto give_up = [&](uint64_t failure) {
      bad = true;
      fail<DeviceBlock>(watch, failure);
    };
    const unsigned lane = threadIdx.x % kWarp;
    for (unsigned first = threadIdx.x - lane; first < static_cast<unsigned>(count); first += kPullThreads) {
      PullWait one{};
      bool waiting = first + lane < static_cast<unsigned>(count);
      if (waiting) one = waits(static_cast<int>(first + lane));
      uint64_t start = 0;
      // All lanes go round until none waits: what one finds wrong is told while others still wait.
      for (unsigned turn = 0; __any_sync(~0u, waiting); ++turn) {
        if (!waiting) continue;
        if (load(one.word) >= one.target) {
          waiting = false;
          if (!calls_the_same(one, watch.own)) give_up(other_call(one));
        } else if (turn % kTurnsPerLook == 0) {
          if (turn == 0) start = nanoseconds();
          const uint64_t told = peek(&watch.end->told);
          // The host's memory is a long way off: not at the first look.
          waiting = told == 0 && peek(&watch.end->own) == 0 && (turn == 0 || peek(&watch.host->ended) == 0) &&
                    static_cast<int64_t>(nanoseconds() - start) <= static_cast<int64_t>(watch.budget);
          if (!waiting) give_up(told != 0 ? pull_failure_of(rank_of(told), one.failure) : one.failure);
        }
      }
    }
    return __syncthreads_or(bad) == 0;
  }
};

}  // namespace ringlet::cuda
