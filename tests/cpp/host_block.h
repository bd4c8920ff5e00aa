// The GPU's pull kernel compiled for the host: a host thread for each block, the host's atomics for the device's.
#pragma once

#include <time.h>

#include <atomic>
#include <functional>
#include <thread>
#include <vector>

#include "cuda/all_to_all.h"
#include "cuda/low_latency.h"
#include "cuda/pull.h"

namespace host_block {

using namespace ringlet;

constexpr size_t kThreads = 3;  // of a block

/// The time for which this thread has run: on a busy machine a peer's block may not run for longer than any limit.
inline uint64_t used_nanoseconds() {
  timespec time{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<uint64_t>(time.tv_sec) * 1'000'000'000 + static_cast<uint64_t>(time.tv_nsec);
}

/// Runs before a block's threads move what is in its works.
inline std::function<void(const cuda::PullShared&)> before_split;

/// What cuda/pull.cu's DeviceBlock is on the device.
class HostBlock {
 public:
  static constexpr size_t kThreadsInOne = kThreads;  // of the host
  static constexpr unsigned kTurnsPerLook = 1;
  static constexpr size_t threads() { return kThreads; }

  explicit HostBlock(int index) : index_(index) {}

  int index() const { return index_; }
  cuda::PullShared& shared() { return shared_; }
  void together() {}
  template <class Act>
  void one(Act act) {
    act();
  }
  template <class Act>
  void each(Act act) {
    for (size_t thread = 0; thread < kThreads; ++thread) act(thread, kThreads);
  }
  template <class Act>
  void lanes(int count, Act act) {
    for (int k = 0; k < count; ++k) act(k, 0, 1);
  }
  static void warp() {}
  static bool all_lanes(bool mine) { return mine; }
  template <class Act>
  void split(int count, Act act) {
    if (before_split) before_split(shared_);
    for (int k = 0; k < count; ++k) {
      for (size_t thread = 0; thread < kThreads; ++thread) act(k, thread, kThreads);
    }
  }
  bool any(bool mine) { return mine; }

  static uint64_t load(const uint64_t* word) {
    return std::atomic_ref(*const_cast<uint64_t*>(word)).load(std::memory_order_acquire);
  }
  static uint64_t peek(const uint64_t* word) {
    return std::atomic_ref(*const_cast<uint64_t*>(word)).load(std::memory_order_relaxed);
  }
  static void fence() { std::atomic_thread_fence(std::memory_order_seq_cst); }
  static void store(uint64_t* word, uint64_t value) { std::atomic_ref(*word).store(value, std::memory_order_release); }
  static bool claim(uint64_t* word, uint64_t value) {
    uint64_t none = 0;
    return std::atomic_ref(*word).compare_exchange_strong(none, value);
  }
  template <class Words>
  void publish(int count, Words words, uint64_t value) {
    for (int k = 0; k < count; ++k) store(words(k), value);
  }

  template <class Waits>
  bool wait(int count, Waits waits, const cuda::PullWatch& watch) {
    for (int k = 0; k < count; ++k) {
      const cuda::PullWait one = waits(k);
      if (!arrives(one, watch)) {
        const uint64_t told = load(&watch.end->told);
        const uint64_t failure = told == 0 ? one.failure : cuda::pull_failure_of(cuda::rank_of(told), one.failure);
        return cuda::fail<HostBlock>(watch, failure), false;
      }
      if (!cuda::calls_the_same(one, watch.own)) {
        return cuda::fail<HostBlock>(watch, cuda::other_call(one)), false;
      }
    }
    return true;
  }

  static void put(uint64_t* word, uint64_t value) { std::atomic_ref(*word).store(value, std::memory_order_relaxed); }
  static void put_packet(uint64_t* at, uint64_t low, uint64_t high) {
    put(at + 1, high);  // a reader may see one half before the other
    put(at, low);
  }
  static void peek_packet(const uint64_t* at, uint64_t& low, uint64_t& high) {
    low = peek(at);
    high = peek(at + 1);
  }
  static uint64_t nanoseconds() { return used_nanoseconds(); }
  static void pause() { std::this_thread::yield(); }

  /// Whether what is waited for has come.
  static bool arrives(const cuda::PullWait& one, const cuda::PullWatch& watch) {
    const uint64_t began = used_nanoseconds();
    while (load(one.word) < one.target) {
      if ((load(&watch.end->own) | load(&watch.end->told) | load(&watch.host->ended)) != 0) return false;
      if (used_nanoseconds() - began > watch.budget) return false;
      std::this_thread::yield();
    }
    return true;
  }

 private:
  int index_;
  cuda::PullShared shared_{};
};

// host_block.cc has every instance, so that one file compiles them.
using PullRun = void (*)(const cuda::PullArgs&, int block);
PullRun find_pull(DType dtype, ReduceOp op);
using LowRun = void (*)(const cuda::LowArgs&, int block);
LowRun find_low_latency(DType dtype);
void run_exchange(const cuda::ExchangeArgs& args, int block);

template <class Args>
void run_blocks(const Args& args, void (*run)(const Args&, int block)) {
  std::vector<std::thread> blocks;
  for (int b = 0; b < args.blocks; ++b) blocks.emplace_back([&args, run, b] { run(args, b); });
  for (std::thread& block : blocks) block.join();
}

}  // namespace host_block
