// Reductions of 8-bit floats.
#include "cuda/launch.cuh"

namespace ringlet::cuda {

ReduceLaunch float8_launch(DType dtype, ReduceOp op) noexcept { return find_float8<LaunchReduce>(dtype, op); }

}  // namespace ringlet::cuda
