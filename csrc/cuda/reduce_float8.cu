// Reductions of 8-bit floats, and the casts.
#include "cuda/launch.cuh"

namespace ringlet::cuda {

ReduceLaunch float8_launch(DType dtype, ReduceOp op) noexcept { return find_float8<LaunchReduce>(dtype, op); }
CastLaunch cast_launch(DType from, DType to) noexcept { return find_cast<LaunchCast>(from, to); }

}  // namespace ringlet::cuda
