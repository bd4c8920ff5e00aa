// The kernels of small all-reduces, and their launch.
#include "cuda/block.cuh"
#include "cuda/launch.cuh"
#include "cuda/low_latency.cuh"
#include "cuda/low_latency.h"

namespace ringlet::cuda {
namespace {

/// What it does beyond pull kernels'. An access of 8 bytes is one at system scope from sm_70 on.
struct LowBlock : DeviceBlock {
  __device__ static void put(uint64_t* word, uint64_t value) {
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
  }
  /// False where the wait was over.
  __device__ static bool flagged(const uint64_t* word, uint32_t flag, const PullWatch& watch, uint64_t failure,
                                 uint64_t* value) {
    uint64_t start = 0;
    for (unsigned turn = 0;; ++turn) {
      *value = peek(word);
      if (static_cast<uint32_t>(*value >> 32) == flag) return true;
      if (turn % kTurnsPerLook != 0) continue;
      if (turn == 0) start = nanoseconds();
      const uint64_t told = peek(&watch.end->told);
      const bool on = told == 0 && peek(&watch.end->own) == 0 && (turn == 0 || peek(&watch.host->ended) == 0) &&
                      static_cast<int64_t>(nanoseconds() - start) <= static_cast<int64_t>(watch.budget);
      if (on) continue;
      fail<DeviceBlock>(watch, told != 0 ? pull_failure_of(rank_of(told), failure) : failure);
      return false;
    }
  }
};

template <class E>
__global__ void __launch_bounds__(kPullThreads, 1) low_latency_kernel(const __grid_constant__ LowArgs args) {
  __shared__ PullShared shared;
  LowBlock block{{shared}};
  LowInterpreter<E, Sum, LowBlock>(args, block).run();
}

template <class E>
cudaError_t launch_of(const LowArgs* args, cudaStream_t stream) {
  if (args == nullptr) return load_kernel(low_latency_kernel<E>);
  return launch<kPullThreads>(low_latency_kernel<E>, static_cast<unsigned>(args->blocks), stream, *args);
}

}  // namespace

cudaError_t launch_low_latency(const LowArgs* args, DType dtype, cudaStream_t stream) {
  switch (dtype) {
    case DType::float32: return launch_of<Float32>(args, stream);
    case DType::float16: return launch_of<Float16>(args, stream);
    case DType::bfloat16: return launch_of<BFloat16>(args, stream);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace ringlet::cuda
