// The CUDA library's facts about itself and the machine.
#include <cuda_runtime.h>

#include <cstdio>

#include "cuda/device_library.h"

namespace {

constexpr int kAnswer = 42;

__global__ void write_answer(int* to) { *to = kAnswer; }

cudaError_t describe_device(RingletCudaFacts* facts) {
  cudaDeviceProp properties;
  if (const cudaError_t refused = cudaGetDeviceProperties(&properties, 0); refused != cudaSuccess) return refused;
  std::snprintf(facts->device, sizeof facts->device, "%s, sm_%d%d", properties.name, properties.major,
                properties.minor);
  return cudaSuccess;
}

/// A build without code for this device's architecture fails here and nowhere earlier.
cudaError_t try_kernel(RingletCudaFacts* facts) {
  int* memory = nullptr;
  if (const cudaError_t refused = cudaMalloc(&memory, sizeof(int)); refused != cudaSuccess) return refused;
  int answer = 0;
  void* parameters[] = {&memory};
  cudaError_t refused = cudaLaunchKernel(reinterpret_cast<const void*>(write_answer), dim3(1), dim3(1), parameters);
  if (refused == cudaSuccess) refused = cudaMemcpy(&answer, memory, sizeof answer, cudaMemcpyDeviceToHost);
  cudaFree(memory);
  facts->kernels_run = refused == cudaSuccess && answer == kAnswer;
  return refused;
}

cudaError_t look(RingletCudaFacts* facts) {
  cudaRuntimeGetVersion(&facts->runtime_version);
  cudaDriverGetVersion(&facts->driver_version);
  if (facts->driver_version == 0) return cudaSuccess;
  if (const cudaError_t refused = cudaGetDeviceCount(&facts->devices); refused != cudaSuccess) return refused;
  int current = 0;
  if (const cudaError_t refused = cudaGetDevice(&current); refused != cudaSuccess) return refused;
  cudaError_t refused = cudaSetDevice(0);
  if (refused == cudaSuccess) refused = describe_device(facts);
  if (refused == cudaSuccess) refused = try_kernel(facts);
  cudaSetDevice(current);
  return refused;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) void ringlet_cuda_facts(RingletCudaFacts* facts) {
  *facts = {};
  const cudaError_t refused = look(facts);
  if (refused == cudaSuccess || refused == cudaErrorNoDevice) return;
  std::snprintf(facts->error, sizeof facts->error, "%s: %s", cudaGetErrorName(refused), cudaGetErrorString(refused));
}
