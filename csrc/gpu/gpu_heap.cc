#include "gpu/gpu_heap.h"

#include <map>
#include <mutex>
#include <string>
#include <utility>

#include "base/environment.h"
#include "base/error.h"
#include "base/partition.h"
#include "base/process.h"

namespace ringlet {
namespace {

constexpr const char* kVariable = "RINGLET_GPU_HEAP_MIB";
constexpr size_t kAlignment = 256;

}  // namespace

GpuHeap* GpuHeap::of(const RingletCudaDevice& device, int number) {
  struct Shared {
    std::mutex mutex;
    std::map<int, GpuHeap*> heaps;
  };
  static constinit OfProcess<Shared> of_process;
  auto& [mutex, heaps] = of_process.get();
  const std::lock_guard lock(mutex);
  if (const auto found = heaps.find(number); found != heaps.end()) return found->second;
  const size_t bytes = bytes_from_environment(kVariable, /*unit=*/size_t{1} << 20, /*least=*/0, /*fallback=*/0);
  return bytes == 0 ? nullptr : heaps[number] = new GpuHeap(device, bytes);
}

GpuHeap::GpuHeap(const RingletCudaDevice& device, size_t bytes) : ranges_(bytes) {
  void* memory = nullptr;
  const auto check = [&](int code, const char* what) {
    if (code == 0) return;
    if (memory != nullptr) device.release(memory);
    throw DeviceError(std::string(what) + " of " + std::to_string(bytes >> 20) + " MiB (" + kVariable +
                      "): " + device.explain(code));
  };
  check(device.allocate(&memory, bytes), "allocating a GPU's registered heap");
  check(device.share(memory, &share_), "sharing a GPU's registered heap");
  base_ = static_cast<std::byte*>(memory);
}

std::byte* GpuHeap::allocate(size_t bytes) {
  const size_t wanted = round_up(bytes == 0 ? 1 : bytes, kAlignment);
  if (const std::optional<size_t> offset = ranges_.take(wanted, kAlignment)) return base_ + *offset;
  throw ResourceError("the GPU's registered heap (" + std::to_string(ranges_.bytes() >> 20) + " MiB) has no room for " +
                      std::to_string(bytes) + " bytes; free registered tensors or raise " + kVariable);
}

void GpuHeap::free(std::byte* pointer) { ranges_.give_back(static_cast<size_t>(pointer - base_)); }

void GpuHeap::free_later(std::byte* pointer) {
  const std::lock_guard lock(mutex_);
  later_.push_back(pointer);
}

std::vector<std::byte*> GpuHeap::take_freed_later() {
  const std::lock_guard lock(mutex_);
  return std::exchange(later_, {});
}

bool GpuHeap::holds(const void* pointer, size_t bytes) const {
  const auto at = reinterpret_cast<uintptr_t>(pointer), begin = reinterpret_cast<uintptr_t>(base_);
  return at >= begin && bytes <= ranges_.bytes() && at - begin <= ranges_.bytes() - bytes;
}

}  // namespace ringlet
