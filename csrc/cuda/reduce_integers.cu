// Reductions of integers and booleans, bitwise ones, and products of complex numbers; bytes are copied by one of them.
#include "cuda/launch.cuh"

namespace ringlet::cuda {

ReduceLaunch other_launch(DType dtype, ReduceOp op) noexcept { return find_other<LaunchReduce>(dtype, op); }

}  // namespace ringlet::cuda
