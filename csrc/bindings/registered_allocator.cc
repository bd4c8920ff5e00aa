#include "bindings/registered_allocator.h"

#include <c10/core/CPUAllocator.h>

#include <atomic>
#include <bit>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "base/error.h"
#include "base/partition.h"
#include "base/process.h"
#include "memory/heap.h"

namespace ringlet {
namespace {

constexpr size_t kLeastBytes = size_t{32} << 10;
constexpr size_t kClassesPerDoubling = 8;               // a block is at most 1/8 larger than the request
constexpr size_t kMostCachedBytes = size_t{512} << 20;  // beyond that, freed blocks go back to the heap

size_t size_class(size_t bytes) {
  const size_t step = std::bit_floor(bytes) / kClassesPerDoubling;
  return round_up(bytes, step);
}

/// To torch's profiler, as torch's own allocators do.
void report(void* pointer, int64_t bytes, size_t in_use) {
  if (!c10::memoryProfilingEnabled()) return;
  c10::reportMemoryUsageToProfiler(pointer, bytes, in_use, 0, c10::Device(c10::DeviceType::CPU));
}

class RegisteredAllocator final : public c10::Allocator {
 public:
  RegisteredAllocator();
  c10::DataPtr allocate(size_t bytes) override;
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }

  size_t cached_bytes() const {
    const std::lock_guard lock(mutex);
    return cached_;
  }
  void use(bool enabled);
  void begin();
  void end();

  void in_child() { forked_.store(true, std::memory_order_relaxed); }
  mutable std::mutex mutex;

 private:
  static void release(void* pointer);
  void* allocate_block(size_t bytes);
  std::byte* take(size_t bytes);
  void give_back(std::byte* pointer);
  bool drop_cached();

  const std::shared_ptr<Heap> heap_ = Heap::process();
  std::atomic<bool> forked_{false};
  std::unordered_map<size_t, std::vector<std::byte*>> free_;  // by size class; guarded by mutex, like the rest
  std::unordered_map<std::byte*, size_t> used_;               // size class of blocks handed out
  size_t cached_ = 0;
  size_t used_bytes_ = 0;
  int begun_ = 0;
  c10::Allocator* before_ = nullptr;  // torch's at the first begin()
  std::atomic<bool> wanted_{false};   // by the user: then a full heap is an error
};

RegisteredAllocator& instance() {
  static RegisteredAllocator& allocator = kept_at_fork<RegisteredAllocator>();  // tensors outlive every static object
  return allocator;
}

RegisteredAllocator::RegisteredAllocator() {
  heap_->when_full([] { return instance().drop_cached(); });
}

c10::DataPtr RegisteredAllocator::allocate(size_t bytes) {
  void* pointer = allocate_block(bytes);
  return {pointer, pointer, &release, c10::Device(c10::DeviceType::CPU)};
}

void* RegisteredAllocator::allocate_block(size_t bytes) {
  if (bytes >= kLeastBytes && !forked_.load(std::memory_order_relaxed)) {
    try {
      return take(bytes);
    } catch (const ResourceError&) {
      if (wanted_.load(std::memory_order_relaxed)) throw;
    }
  }
  return c10::GetDefaultCPUAllocator()->raw_allocate(bytes);
}

void RegisteredAllocator::use(bool enabled) {
  const std::lock_guard lock(mutex);
  wanted_.store(enabled, std::memory_order_relaxed);
  before_ = enabled ? this : c10::GetDefaultCPUAllocator();
  if (begun_ == 0) c10::SetCPUAllocator(before_);
}

void RegisteredAllocator::begin() {
  const std::lock_guard lock(mutex);
  if (begun_++ > 0) return;
  before_ = c10::GetCPUAllocator();
  c10::SetCPUAllocator(this);
}

void RegisteredAllocator::end() {
  const std::lock_guard lock(mutex);
  if (--begun_ == 0) c10::SetCPUAllocator(before_);
}

std::byte* RegisteredAllocator::take(size_t bytes) {
  const size_t size = bytes <= heap_->bytes() ? size_class(bytes) : bytes;  // a larger one: the heap refuses it
  std::byte* pointer = nullptr;
  size_t in_use = 0;
  const auto hand_out = [&] {  // mutex is held
    used_.emplace(pointer, size);
    in_use = used_bytes_ += size;
  };
  {
    const std::lock_guard lock(mutex);
    if (std::vector<std::byte*>& list = free_[size]; !list.empty()) {
      pointer = list.back();
      list.pop_back();
      cached_ -= size;
      hand_out();
    }
  }
  if (pointer == nullptr) {
    pointer = heap_->allocate(size);
    const std::lock_guard lock(mutex);
    hand_out();
  }
  report(pointer, static_cast<int64_t>(size), in_use);
  return pointer;
}

void RegisteredAllocator::release(void* pointer) {
  if (pointer == nullptr) return;
  RegisteredAllocator& self = instance();
  if (!self.heap_->locate(pointer, 0)) {
    c10::GetDefaultCPUAllocator()->raw_deallocate(pointer);
  } else if (!self.forked_.load(std::memory_order_relaxed)) {  // a forked child must not free its parent's tensors
    self.give_back(static_cast<std::byte*>(pointer));
  }
}

/// Whether there was a block to free.
bool RegisteredAllocator::drop_cached() {
  decltype(free_) dropped;
  {
    const std::lock_guard lock(mutex);
    dropped.swap(free_);
    cached_ = 0;
  }
  bool any = false;
  for (const auto& [size, blocks] : dropped) {
    for (std::byte* block : blocks) heap_->free(block), any = true;
  }
  return any;
}

void RegisteredAllocator::give_back(std::byte* pointer) {
  size_t size = 0, in_use = 0;
  bool kept = false;
  {
    const std::lock_guard lock(mutex);
    const auto block = used_.find(pointer);
    size = block->second;
    used_.erase(block);
    in_use = used_bytes_ -= size;
    kept = cached_ + size <= kMostCachedBytes;
    if (kept) {
      free_[size].push_back(pointer);
      cached_ += size;
    }
  }
  if (!kept) heap_->free(pointer);
  report(pointer, -static_cast<int64_t>(size), in_use);
}

}  // namespace

c10::Allocator& registered_allocator() { return instance(); }

void use_registered_allocator(bool enabled) { instance().use(enabled); }

void begin_registered_tensors() { instance().begin(); }

void end_registered_tensors() { instance().end(); }

size_t registered_allocator_cache_bytes() { return instance().cached_bytes(); }

}  // namespace ringlet
