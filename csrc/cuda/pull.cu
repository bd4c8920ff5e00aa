// The kernel that runs pull plans, and its launch.
#include <cuda_runtime.h>

#include "cuda/launch.cuh"
#include "cuda/pull.h"

namespace ringlet::cuda {
namespace {

constexpr unsigned kWarp = 32;
// Of a wait, from one look at the clock and at whether the rank has failed to the next.
constexpr unsigned kTurnsPerLook = 32;
static_assert(kMostTogether * kWarp <= kThreads && kMostRanks <= kThreads);

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
    act(size_t{threadIdx.x}, size_t{kThreads});
  }
  /// Each of `count` acts by a thread of another warp.
  template <class Act>
  __device__ void apart(unsigned count, Act act) {
    if (threadIdx.x % kWarp == 0 && threadIdx.x / kWarp < count) act(static_cast<int>(threadIdx.x / kWarp));
  }
  /// Each of `count` acts by as many whole warps as there are for it.
  template <class Act>
  __device__ void split(unsigned count, Act act) {
    const unsigned team = kThreads / kWarp / count * kWarp, k = threadIdx.x / team;
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
  /// To `count` words, each by a thread of its own.
  template <class Words>
  __device__ void publish(int count, Words words, uint64_t value) {
    __syncthreads();  // all threads' stores come before
    const auto k = static_cast<int>(threadIdx.x);
    if (k < count) asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(words(k)), "l"(value) : "memory");
  }
  __device__ static uint64_t nanoseconds() {
    uint64_t now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
  }

  /// Each of `count` waits by a thread of its own; false on all threads where one is over, or a peer calls something
  /// else.
  template <class Waits>
  __device__ bool wait(int count, Waits waits, const PullCall& own, uint64_t budget, PullEnd* end) {
    bool bad = false;
    const auto fail = [&](uint64_t failure) {
      bad = true;
      atomicCAS(reinterpret_cast<unsigned long long*>(&end->own), 0ull, failure);
    };
    const unsigned lane = threadIdx.x % kWarp;
    for (unsigned first = threadIdx.x - lane; first < static_cast<unsigned>(count); first += kThreads) {
      PullWait one{};
      bool waiting = first + lane < static_cast<unsigned>(count);
      if (waiting) one = waits(static_cast<int>(first + lane));
      uint64_t start = 0;
      // All lanes go round until none waits: what one finds wrong is told while others still wait.
      for (unsigned turn = 0; __any_sync(~0u, waiting); ++turn) {
        if (!waiting) continue;
        if (load(one.word) >= one.target) {
          waiting = false;
          const PullCall* call = one.call;
          if (call != nullptr && (call->signature != own.signature || call->count != own.count)) {
            fail(one.failure | kOtherCall);
          }
        } else if (turn % kTurnsPerLook == 0) {
          if (turn == 0) start = nanoseconds();
          const uint64_t told = peek(&end->told);
          waiting = told == 0 && peek(&end->own) == 0 &&
                    static_cast<int64_t>(nanoseconds() - start) <= static_cast<int64_t>(budget);
          if (!waiting) fail(told != 0 ? pull_failure_of(rank_of(told), one.failure) : one.failure);
        }
      }
    }
    return __syncthreads_or(bad) == 0;
  }
};

template <class E, class Op>
__global__ void __launch_bounds__(kThreads, 1) pull_kernel(const __grid_constant__ PullArgs args) {
  __shared__ PullShared shared;
  DeviceBlock block{shared};
  PullInterpreter<E, Op, DeviceBlock>(args, block).run();
}

struct LaunchPull {
  using Function = PullLaunch;
  template <class E, class Op>
  static Function get() {
    return [](const PullArgs& args, cudaStream_t stream) {
      return launch(pull_kernel<E, Op>, static_cast<unsigned>(args.layout.blocks), stream, args);
    };
  }
};

}  // namespace

PullLaunch pull_launch(DType dtype, ReduceOp op) noexcept {
  if (const PullLaunch launch = find_float<LaunchPull>(dtype, op)) return launch;
  if (const PullLaunch launch = find_float8<LaunchPull>(dtype, op)) return launch;
  return find_other<LaunchPull>(dtype, op);
}

}  // namespace ringlet::cuda
