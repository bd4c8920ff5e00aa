// Registered memory of a GPU as torch's tensors, and as what an allocator of torch's takes its memory from.
//
// Contract: what is freed may be taken again when the device is done with it: freeing waits for the device, or, while a
// CUDA graph is captured, the next who takes some does. Thread safety: from any thread.
#pragma once

#include <ATen/core/Tensor.h>
#include <sys/types.h>

namespace ringlet {

class GpuHeap;

/// Null if the device has no registered heap.
GpuHeap* heap_of(const c10::Device& device);

/// Throws InvalidUsage if the device has no registered memory, DeviceError if torch has no such device, ResourceError
/// if there is no room.
at::Tensor empty_on_gpu(c10::IntArrayRef sizes, const at::TensorOptions& options, size_t bytes);

}  // namespace ringlet

extern "C" {

/// What torch.cuda.memory.CUDAPluggableAllocator looks for in a library by name (python/ringlet/memory.py); the last
/// argument is a stream. Null if there is no registered memory, or no room.
__attribute__((visibility("default"))) void* ringlet_gpu_heap_allocate(ssize_t bytes, int device, void* stream);
__attribute__((visibility("default"))) void ringlet_gpu_heap_free(void* memory, ssize_t bytes, int device,
                                                                  void* stream);
}
