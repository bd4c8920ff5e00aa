#include "bindings/gpu_memory.h"

#include <ATen/ops/from_blob.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <cstring>
#include <vector>

#include "base/error.h"
#include "bindings/on_device.h"
#include "gpu/gpu.h"
#include "gpu/gpu_heap.h"

namespace ringlet {

GpuHeap* heap_of(const c10::Device& device) {
  if (device.is_cpu() || !is_served(device)) return nullptr;
  const c10::DeviceGuard current(device);
  return GpuHeap::of(gpu_device(), c10::impl::VirtualGuardImpl(device.type()).getDevice().index());
}

namespace {

/// Returns when the device has completed its work. False if a wait is impossible, because the current stream is being
/// captured or the process ends.
bool wait_for(const c10::Device& device) {
  try {
    const c10::impl::VirtualGuardImpl guard(device.type());
    int captured = 0;
    const int refused = gpu_device().capturing(guard.getStream(device).native_handle(), &captured);
    if (refused != 0 || captured != 0) return false;
    guard.synchronizeDevice(device.index());
    return true;
  } catch (const c10::Error&) {
    return false;
  }
}

void give_back(GpuHeap& heap, const std::vector<std::byte*>& blocks, const c10::Device& device) {
  if (blocks.empty()) return;
  const bool through = wait_for(device);
  for (std::byte* block : blocks) through ? heap.free(block) : heap.free_later(block);
}

c10::Device device_of(int number) {
  return {std::strcmp(gpu_device().serves, "cuda") == 0 ? c10::kCUDA : c10::kPrivateUse1,
          static_cast<c10::DeviceIndex>(number)};
}

}  // namespace

at::Tensor empty_on_gpu(c10::IntArrayRef sizes, const at::TensorOptions& options, size_t bytes) {
  if (!is_served(options.device())) throw InvalidUsage("empty: no registered memory on " + options.device().str());
  check_present(options.device());
  const c10::impl::VirtualGuardImpl guard(options.device().type());
  const c10::Device device = options.device().has_index() ? options.device() : guard.getDevice();
  GpuHeap* heap = heap_of(device);
  if (heap == nullptr) {
    throw InvalidUsage("empty: no registered memory on " + device.str() +
                       ": set RINGLET_GPU_HEAP_MIB before the first use of the GPU");
  }
  give_back(*heap, heap->take_freed_later(), device);
  const auto release = [heap, device](void* pointer) { give_back(*heap, {static_cast<std::byte*>(pointer)}, device); };
  return at::for_blob(heap->allocate(bytes), sizes)
      .deleter(release)
      .options(options.device(device))
      .target_device(device)
      .make_tensor();
}

}  // namespace ringlet

/// Null tells torch that there is no room, for which it has an error of its own. It frees what it has cached then, and
/// asks again.
void* ringlet_gpu_heap_allocate(ssize_t bytes, int device, void*) {
  using namespace ringlet;
  try {
    GpuHeap* heap = heap_of(device_of(device));
    if (heap == nullptr) return nullptr;
    give_back(*heap, heap->take_freed_later(), device_of(device));
    return heap->allocate(static_cast<size_t>(bytes));
  } catch (const Error&) {
    return nullptr;
  }
}

void ringlet_gpu_heap_free(void* memory, ssize_t, int device, void*) {
  using namespace ringlet;
  if (memory == nullptr) return;
  const c10::Device where = device_of(device);
  give_back(*heap_of(where), {static_cast<std::byte*>(memory)}, where);
}
