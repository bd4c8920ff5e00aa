#include "bindings/hold.h"

#include <mutex>
#include <unordered_map>

#include "base/log.h"
#include "base/process.h"

namespace ringlet {
namespace {

/// The storages that would be resizable were it not for the holds of them.
struct Holds {
  /// Whether release() must be called. It must not for a storage without an allocator (share_memory_() makes such):
  /// that can never be resized, whatever its flag says.
  bool take(c10::StorageImpl& storage) {
    const std::lock_guard lock(mutex);
    if (storage.allocator() == nullptr) return false;
    if (!storage.resizable() && counts.find(&storage) == counts.end()) return false;
    storage.set_resizable(false);
    ++counts[&storage];
    return true;
  }

  void release(c10::StorageImpl& storage) {
    const std::lock_guard lock(mutex);
    const auto found = counts.find(&storage);
    if (--found->second > 0) return;
    counts.erase(found);
    // share_memory_() has given the storage other memory meanwhile, and torch knows no allocator for it.
    if (storage.allocator() != nullptr) storage.set_resizable(true);
  }

  void in_child() {}  // its tensors are held as its parent's are

  std::mutex mutex;
  std::unordered_map<c10::StorageImpl*, size_t> counts;  // guarded by mutex
};
Holds& holds = kept_at_fork<Holds>();

}  // namespace

void MemoryHold::add(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cpu() || !tensor.has_storage()) return;
  const c10::Storage& storage = tensor.storage();
  c10::StorageImpl* const impl = storage.unsafeGetStorageImpl();
  if (!held_.empty() && held_.back().storage.unsafeGetStorageImpl() == impl) return;  // input and output are one
  held_.push_back({storage, storage.data(), holds.take(*impl)});
}

MemoryHold::~MemoryHold() {
  for (const Held& held : held_) {
    if (held.storage.data() != held.memory && logging(LogLevel::warning)) {
      log(LogLevel::warning, {},
          "a tensor got other memory while a call on it was in flight, so the call's result is lost: wait for the "
          "call before share_memory_()");
    }
    if (held.counted) holds.release(*held.storage.unsafeGetStorageImpl());
  }
}

}  // namespace ringlet
