// Reductions of floats of 16 bits and more, and sums of complex numbers.
#include "cuda/launch.cuh"

namespace ringlet::cuda {

ReduceLaunch float_launch(DType dtype, ReduceOp op) noexcept { return find_float<LaunchReduce>(dtype, op); }

}  // namespace ringlet::cuda
