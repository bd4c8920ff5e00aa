#include "bindings/hold.h"

#include <pthread.h>

#include <mutex>
#include <unordered_map>

#include "base/log.h"

namespace ringlet {
namespace {

/// The storages that would be resizable were it not for the holds of them.
class Holds {
 public:
  /// Made when the library is loaded: a child that is forked while another thread makes it would wait for that. Never
  /// destroyed: calls may end after everything else.
  static Holds& of_process;

  /// Whether release() must be called. It must not for a storage without an allocator (share_memory_() makes such):
  /// that can never be resized, whatever its flag says.
  bool take(c10::StorageImpl& storage) {
    const std::lock_guard lock(mutex_);
    if (storage.allocator() == nullptr) return false;
    if (!storage.resizable() && counts_.find(&storage) == counts_.end()) return false;
    storage.set_resizable(false);
    ++counts_[&storage];
    return true;
  }

  void release(c10::StorageImpl& storage) {
    const std::lock_guard lock(mutex_);
    const auto found = counts_.find(&storage);
    if (--found->second > 0) return;
    counts_.erase(found);
    // share_memory_() has given the storage other memory meanwhile, and torch knows no allocator for it.
    if (storage.allocator() != nullptr) storage.set_resizable(true);
  }

 private:
  Holds() {
    ::pthread_atfork([] { of_process.mutex_.lock(); }, [] { of_process.mutex_.unlock(); },
                     [] { of_process.mutex_.unlock(); });
  }

  std::mutex mutex_;
  std::unordered_map<c10::StorageImpl*, size_t> counts_;  // guarded by mutex_
};
Holds& Holds::of_process = *new Holds;

}  // namespace

void MemoryHold::add(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cpu() || !tensor.has_storage()) return;
  const c10::Storage& storage = tensor.storage();
  c10::StorageImpl* const impl = storage.unsafeGetStorageImpl();
  if (!held_.empty() && held_.back().storage.unsafeGetStorageImpl() == impl) return;  // input and output are one
  held_.push_back({storage, storage.data(), Holds::of_process.take(*impl)});
}

MemoryHold::~MemoryHold() {
  for (const Held& held : held_) {
    if (held.storage.data() != held.memory && logging(LogLevel::warning)) {
      log(LogLevel::warning, {},
          "a tensor got other memory while a call on it was in flight, so the call's result is lost: wait for the "
          "call before share_memory_()");
    }
    if (held.counted) Holds::of_process.release(*held.storage.unsafeGetStorageImpl());
  }
}

}  // namespace ringlet
