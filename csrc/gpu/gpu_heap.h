// Registered memory of a GPU: one allocation of a process, which peers reach, so that they read tensors where they lie.
//
// Contract: of the size that RINGLET_GPU_HEAP_MIB says; there is none where that is 0 or not set. An address in it is
// named by its offset in every process, so allocating is local. What is freed may be allocated again at once: whoever
// frees sees to it that the device is done with it.
// Ownership: lives as long as the process, since other processes may have it open. Thread safety: all calls from any
// thread; the device must be current in of().
#pragma once

#include <cstddef>
#include <mutex>
#include <vector>

#include "cuda/device_library.h"
#include "memory/ranges.h"

namespace ringlet {

class GpuHeap {
 public:
  /// This process's on the current device, whose number is given; made on first use. Null where there is none.
  /// InvalidUsage for a wrong RINGLET_GPU_HEAP_MIB, DeviceError where the GPU has no room.
  static GpuHeap* of(const RingletCudaDevice& device, int number);

  /// Aligned to 256. Throws ResourceError when the heap is full.
  std::byte* allocate(size_t bytes);
  void free(std::byte* pointer);
  /// Kept until somebody takes them, waits for the device and frees them: while a CUDA graph is captured nobody may
  /// wait.
  void free_later(std::byte* pointer);
  std::vector<std::byte*> take_freed_later();

  bool holds(const void* pointer, size_t bytes) const;
  std::byte* base() const { return base_; }
  size_t bytes() const { return ranges_.bytes(); }
  const RingletCudaShare& share() const { return share_; }

 private:
  GpuHeap(const RingletCudaDevice& device, size_t bytes);

  std::byte* base_ = nullptr;
  RingletCudaShare share_{};
  Ranges ranges_;
  std::mutex mutex_;
  std::vector<std::byte*> later_;  // guarded by mutex_
};

}  // namespace ringlet
