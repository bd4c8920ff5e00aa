// The kernel that runs an all-to-all, and its launch.
#include "cuda/all_to_all.h"
#include "cuda/block.cuh"
#include "cuda/launch.cuh"

namespace ringlet::cuda {
namespace {

__global__ void __launch_bounds__(kPullThreads, 1) exchange_kernel(const __grid_constant__ ExchangeArgs args) {
  __shared__ PullShared shared;
  DeviceBlock block{shared};
  ExchangeInterpreter<DeviceBlock>(args, block).run();
}
static_assert(sizeof(ExchangeArgs) <= 4096);  // what a kernel's parameters may have

}  // namespace

cudaError_t launch_exchange(const ExchangeArgs* args, cudaStream_t stream) {
  if (args == nullptr) return load_kernel(exchange_kernel);
  return launch<kPullThreads>(exchange_kernel, static_cast<unsigned>(args->blocks), stream, *args);
}

}  // namespace ringlet::cuda
