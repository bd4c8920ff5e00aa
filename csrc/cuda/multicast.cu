// The kernels on multicast memory, and their launch.
#include "cuda/block.cuh"
#include "cuda/launch.cuh"
#include "cuda/multicast.cuh"
#include "cuda/multicast.h"

// PTX has the instructions since CUDA 12.1, and their sums in float32 since 12.2.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900 && CUDART_VERSION >= 12020
#define RINGLET_MULTIMEM 1
#else
#define RINGLET_MULTIMEM 0
#endif

namespace ringlet::cuda {
namespace {

/// What it does beyond pull kernels'. Without the instructions nobody launches it: has_multicast().
struct MulticastBlock : DeviceBlock {
  template <class E>
  __device__ static Pack load_sum(const std::byte* at) {
    Pack pack{};
#if RINGLET_MULTIMEM
    uint32_t* const w = pack.words;
    if constexpr (std::is_same_v<E, Float32>) {
      float f[4];
      asm volatile("multimem.ld_reduce.relaxed.sys.global.add.v4.f32 {%0, %1, %2, %3}, [%4];"
                   : "=f"(f[0]), "=f"(f[1]), "=f"(f[2]), "=f"(f[3])
                   : "l"(at)
                   : "memory");
      for (int i = 0; i < 4; ++i) w[i] = __float_as_uint(f[i]);
    } else if constexpr (std::is_same_v<E, Float16>) {
      asm volatile("multimem.ld_reduce.relaxed.sys.global.add.acc::f32.v4.f16x2 {%0, %1, %2, %3}, [%4];"
                   : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
                   : "l"(at)
                   : "memory");
    } else {
      static_assert(std::is_same_v<E, BFloat16>);
      asm volatile("multimem.ld_reduce.relaxed.sys.global.add.acc::f32.v4.bf16x2 {%0, %1, %2, %3}, [%4];"
                   : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
                   : "l"(at)
                   : "memory");
    }
#else
    __trap();
#endif
    return pack;
  }

  /// 16 bytes, whatever they are made of.
  __device__ static void store_for_all(std::byte* at, const Pack& pack) {
#if RINGLET_MULTIMEM
    float f[4];
    for (int i = 0; i < 4; ++i) f[i] = __uint_as_float(pack.words[i]);
    asm volatile("multimem.st.relaxed.sys.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(at), "f"(f[0]), "f"(f[1]),
                 "f"(f[2]), "f"(f[3])
                 : "memory");
#else
    __trap();
#endif
  }

  /// The same memory has two addresses. The memory model orders accesses by one and by the other only if there is a fence
  /// of this kind on the way: here, in the threads that carry all others' accesses on.
  template <class Words>
  __device__ void publish(int count, Words words, uint64_t value) {
    __syncthreads();
    const auto k = static_cast<int>(threadIdx.x);
    if (k >= count) return;
    asm volatile("fence.proxy.alias;" ::: "memory");
    store(words(k), value);
  }
};

template <class E>
__global__ void __launch_bounds__(kPullThreads, 1) multicast_kernel(const __grid_constant__ MulticastArgs args) {
  __shared__ PullShared shared;
  MulticastBlock block{{shared}};
  MulticastInterpreter<E, MulticastBlock>(args, block).run();
}

template <class E>
cudaError_t launch_of(const MulticastArgs* args, cudaStream_t stream) {
  if (args == nullptr) return load_kernel(multicast_kernel<E>);
  return launch<kPullThreads>(multicast_kernel<E>, static_cast<unsigned>(args->blocks), stream, *args);
}

}  // namespace

cudaError_t launch_multicast(const MulticastArgs* args, DType dtype, cudaStream_t stream) {
  switch (dtype) {
    case DType::float32: return launch_of<Float32>(args, stream);
    case DType::float16: return launch_of<Float16>(args, stream);
    case DType::bfloat16: return launch_of<BFloat16>(args, stream);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace ringlet::cuda
