// Multicast memory and the kernels on it: sums of float32, float16 and bfloat16.
//
// launch_multicast() without arguments only loads a kernel. The others are cuda.h's contract. Where the toolkit knows
// no multicast, or the driver, has_multicast() is 0 and the others refuse.
#pragma once

#include <cuda_runtime.h>

#include "cuda/cuda.h"
#include "cuda/multicast.h"

namespace ringlet::cuda {

cudaError_t launch_multicast(const MulticastArgs* args, DType dtype, cudaStream_t stream);

int has_multicast(int device);
int make_multicast(RingletCudaMulticast* multicast, int* descriptor);
int take_multicast(RingletCudaMulticast* multicast, int descriptor);
int join_multicast(RingletCudaMulticast* multicast);
int map_multicast(RingletCudaMulticast* multicast);
int release_multicast(RingletCudaMulticast* multicast);

}  // namespace ringlet::cuda
