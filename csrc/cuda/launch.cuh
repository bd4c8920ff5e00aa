// Launches of the reductions of reduce.h. Included by the files that instantiate them, one table each.
#pragma once

#include <cuda_runtime.h>

#include <atomic>

#include "cuda/all_to_all.h"
#include "cuda/pull.h"
#include "cuda/table.h"

namespace ringlet::cuda {

struct LowArgs;  // low_latency.h

/// Without arguments they only load their kernels: one that is loaded at its first launch waits for kernels that run, and
/// these may wait for it.
using ReduceLaunch = cudaError_t (*)(const ReduceArgs* args, ReduceOp op, cudaStream_t stream);
using PullLaunch = cudaError_t (*)(const PullArgs* args, cudaStream_t stream);

ReduceLaunch float_launch(DType dtype, ReduceOp op) noexcept;
ReduceLaunch float8_launch(DType dtype, ReduceOp op) noexcept;
ReduceLaunch other_launch(DType dtype, ReduceOp op) noexcept;
PullLaunch pull_launch(DType dtype, ReduceOp op) noexcept;

cudaError_t launch_exchange(const ExchangeArgs* args, cudaStream_t stream);
/// Sums of float32, float16 and bfloat16.
cudaError_t launch_low_latency(const LowArgs* args, DType dtype, cudaStream_t stream);

constexpr int kMostPulledTogether = 3;
cudaError_t launch_pull_together(const PullArgs* ranks, int count, DType dtype, cudaStream_t stream);

constexpr int kThreads = 256;

/// How many blocks fit on a processor at once. More would wait in line, and as all get the same share of the work, the
/// last ones would have the device for themselves. Asked once for each kernel.
template <auto kernel>
cudaError_t count_resident(int* blocks) {
  static std::atomic<int> known{0};
  if ((*blocks = known.load(std::memory_order_relaxed)) > 0) return cudaSuccess;
  const cudaError_t refused = cudaOccupancyMaxActiveBlocksPerMultiprocessor(blocks, kernel, kThreads, /*shared=*/0);
  known.store(*blocks, std::memory_order_relaxed);
  return refused;
}

/// How many blocks for `packs` items of which a thread takes `at_once`; `resident` of them fit on a processor.
inline cudaError_t count_blocks(size_t items, int at_once, int resident, unsigned* blocks) {
  int device = 0, processors = 0;
  if (const cudaError_t refused = cudaGetDevice(&device); refused != cudaSuccess) return refused;
  const cudaError_t refused = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  if (refused != cudaSuccess) return refused;
  const size_t per_block = static_cast<size_t>(kThreads) * at_once;
  const size_t wanted = (items + per_block - 1) / per_block;
  const size_t most = static_cast<size_t>(processors) * static_cast<size_t>(resident);
  *blocks = static_cast<unsigned>(wanted < 1 ? 1 : wanted < most ? wanted : most);
  return cudaSuccess;
}

/// Says what became of this launch. cudaGetLastError() after <<<>>> may tell of another call's refusal: of an event
/// that was asked whether it is done, and was not.
template <int kBlockThreads = kThreads, class Args>
cudaError_t launch(void (*kernel)(Args), unsigned blocks, cudaStream_t stream, const Args& args) {
  void* parameters[] = {const_cast<std::remove_const_t<Args>*>(&args)};
  return cudaLaunchKernel(reinterpret_cast<const void*>(kernel), dim3(blocks), dim3(kBlockThreads), parameters, 0,
                          stream);
}

template <class Args>
cudaError_t load_kernel(void (*kernel)(Args)) {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel));
}

__device__ inline size_t thread_index() { return size_t{blockIdx.x} * kThreads + threadIdx.x; }
__device__ inline size_t thread_count() { return size_t{gridDim.x} * kThreads; }

template <class E, class Ops, int kMost>
__global__ void __launch_bounds__(kThreads, /*blocks of a processor=*/2)
    reduce_kernel(const __grid_constant__ ReduceWork<kMost> work) {
  reduce_as_thread<E, Ops, kMost>(work, thread_index(), thread_count());
}

template <class E, class Ops, int kMost>
cudaError_t launch_work(const ReduceArgs& args, ReduceOp op, cudaStream_t stream) {
  const ReduceWork<kMost> work = make_work<kMost>(args, op, sizeof(typename E::Bits));
  const size_t edges = work.count - work.packs * kPerPack<E>;
  unsigned blocks = 0;
  int resident = 0;
  cudaError_t refused = count_resident<reduce_kernel<E, Ops, kMost>>(&resident);
  if (refused != cudaSuccess) return refused;
  refused = count_blocks(work.packs > edges ? work.packs : edges, kPacksAtOnce<E, Ops>, resident, &blocks);
  if (refused != cudaSuccess) return refused;
  return launch(reduce_kernel<E, Ops, kMost>, blocks, stream, work);
}

struct LaunchReduce {
  using Function = ReduceLaunch;
  template <class E, class Ops>
  static Function get() {
    return [](const ReduceArgs* args, ReduceOp op, cudaStream_t stream) {
      if (args == nullptr) {
        const cudaError_t refused = load_kernel(reduce_kernel<E, Ops, 2>);
        return refused == cudaSuccess ? load_kernel(reduce_kernel<E, Ops, kMostSources>) : refused;
      }
      const bool pair = args->n == 2 && args->scaled_source < 0 && args->divisor == 1;
      return pair ? launch_work<E, Ops, 2>(*args, op, stream) : launch_work<E, Ops, kMostSources>(*args, op, stream);
    };
  }
};

}  // namespace ringlet::cuda
