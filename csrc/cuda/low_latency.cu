// The kernels of small all-reduces, and their launch.
#include "cuda/block.cuh"
#include "cuda/launch.cuh"
#include "cuda/low_latency.h"

namespace ringlet::cuda {
namespace {

/// What it does beyond pull kernels'. Each 8 bytes of an access are one at system scope from sm_70 on.
struct LowBlock : DeviceBlock {
  static constexpr size_t kThreadsInOne = 1;
  static constexpr unsigned kTurnsPerLook = cuda::kTurnsPerLook;

  __device__ static constexpr size_t threads() { return kPullThreads; }
  __device__ static void put(uint64_t* word, uint64_t value) {
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
  }
  __device__ static void put_packet(uint64_t* at, uint64_t low, uint64_t high) {
    asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(at), "l"(low), "l"(high) : "memory");
  }
  __device__ static void peek_packet(const uint64_t* at, uint64_t& low, uint64_t& high) {
    asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];" : "=l"(low), "=l"(high) : "l"(at) : "memory");
  }
  __device__ static void pause() {}
};

template <class E>
__global__ void __launch_bounds__(kPullThreads, 1) low_latency_kernel(const __grid_constant__ LowArgs args) {
  __shared__ PullShared shared;
  LowBlock block{{shared}};
  LowInterpreter<E, Sums, LowBlock>(args, block).run();
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
