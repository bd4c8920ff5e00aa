// The launch of low_latency.cu's kernels: sums of float32, float16 and bfloat16. Without arguments it only loads one.
#pragma once

#include <cuda_runtime.h>

#include "cuda/low_latency.h"
#include "reduce/reduce.h"

namespace ringlet::cuda {

cudaError_t launch_low_latency(const LowArgs* args, DType dtype, cudaStream_t stream);

}  // namespace ringlet::cuda
