// The kernel that runs pull plans, and its launch.
#include <cuda_runtime.h>

#include "cuda/block.cuh"
#include "cuda/launch.cuh"
#include "cuda/pull.h"

namespace ringlet::cuda {
namespace {

template <class E, class Ops>
__global__ void __launch_bounds__(kPullThreads, 1) pull_kernel(const __grid_constant__ PullArgs args) {
  __shared__ PullShared shared;
  DeviceBlock block{shared};
  PullInterpreter<E, Ops, DeviceBlock>(args, block).run();
}

struct PullTogether {
  PullArgs ranks[kMostPulledTogether];
};
static_assert(sizeof(PullTogether) <= 4096);  // what a kernel's parameters may have

template <class E, class Ops>
__global__ void __launch_bounds__(kPullThreads, 1) pull_together_kernel(const __grid_constant__ PullTogether all) {
  __shared__ PullShared shared;
  DeviceBlock block{shared};
  PullInterpreter<E, Ops, DeviceBlock>(all.ranks[blockIdx.y], block).run();
}

template <class E, class Ops>
cudaError_t launch_together(const PullTogether& all, int count, cudaStream_t stream) {
  void* parameters[] = {const_cast<PullTogether*>(&all)};
  const dim3 grid(static_cast<unsigned>(all.ranks[0].blocks), static_cast<unsigned>(count));
  return cudaLaunchKernel(reinterpret_cast<const void*>(pull_together_kernel<E, Ops>), grid, dim3(kPullThreads),
                          parameters, 0, stream);
}

struct LaunchPull {
  using Function = PullLaunch;
  template <class E, class Ops>
  static Function get() {
    return [](const PullArgs* args, cudaStream_t stream) {
      if (args == nullptr) return load_kernel(pull_kernel<E, Ops>);
      return launch<kPullThreads>(pull_kernel<E, Ops>, static_cast<unsigned>(args->blocks), stream, *args);
    };
  }
};

}  // namespace

PullLaunch pull_launch(DType dtype, ReduceOp op) noexcept {
  if (const PullLaunch launch = find_float<LaunchPull>(dtype, op)) return launch;
  if (const PullLaunch launch = find_float8<LaunchPull>(dtype, op)) return launch;
  return find_other<LaunchPull>(dtype, op);
}

cudaError_t launch_pull_together(const PullArgs* ranks, int count, DType dtype, cudaStream_t stream) {
  PullTogether all{};
  if (count < 1 || count > kMostPulledTogether) return cudaErrorInvalidValue;
  const ReduceOp op = ranks->op;
  for (int q = 0; q < count; ++q) all.ranks[q] = ranks[q];
  if (dtype == DType::int32 && op == ReduceOp::sum)
    return launch_together<Integer<int32_t>, Arithmetic>(all, count, stream);
  if (dtype == DType::uint8 && op == ReduceOp::bor)
    return launch_together<Integer<uint8_t>, Bitwise>(all, count, stream);
  return cudaErrorInvalidValue;
}

}  // namespace ringlet::cuda
