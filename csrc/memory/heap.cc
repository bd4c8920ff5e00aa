#include "memory/heap.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <unistd.h>

#include <mutex>
#include <set>
#include <string>
#include <utility>

#include "base/environment.h"
#include "base/error.h"
#include "base/partition.h"
#include "base/process.h"
#include "base/system_call.h"

namespace ringlet {
namespace {

constexpr size_t kAlignment = 64;
constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kCounters = 512;                  // allocated together
constexpr size_t kReturnBytes = size_t{32} << 20;  ///< freed registered tensors from this size on give their pages back
                                                   ///< at once

size_t default_heap_bytes() {
  const size_t memory = static_cast<size_t>(::sysconf(_SC_PHYS_PAGES)) * static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  return bytes_from_environment("RINGLET_HEAP_MIB", /*unit=*/size_t{1} << 20, /*least=*/32,
                                round_up(memory, kHugePage));
}

}  // namespace

/// All heaps that this process has mapped. A forked child makes its copies private.
struct Heap::Living {
  void in_child() {
    for (Heap* heap : heaps) heap->make_private();
  }

  std::mutex mutex;
  std::set<Heap*> heaps;  // guarded by mutex
};
Heap::Living& Heap::living = kept_at_fork<Heap::Living>();

const std::shared_ptr<Heap>& Heap::process() {
  struct Shared {
    std::mutex mutex;
    std::shared_ptr<Heap> heap;
  };
  // A forked child keeps its parent's pages mapped, because its tensors are in them.
  static constinit OfProcess<Shared> of_process;
  Shared& shared = of_process.get();
  const std::lock_guard lock(shared.mutex);
  if (!shared.heap) shared.heap = std::make_shared<Heap>(default_heap_bytes());
  return shared.heap;
}

Heap::Heap(size_t bytes) : owner_(this_process()), ranges_(bytes) {
  file_ = Descriptor(::memfd_create("ringlet-heap", MFD_CLOEXEC));
  if (!file_.valid()) throw_errno("memfd_create");
  if (repeated([&] { return ::ftruncate(file_.get(), static_cast<off_t>(bytes)); }) != 0) {
    throw_errno("cannot size the registered heap to " + std::to_string(bytes >> 20) + " MiB",
                "lower RINGLET_HEAP_MIB, or raise ulimit -f");
  }
  map_ = Mapping(file_.get(), bytes, Mapping::Access::read_write);
  if (repeated([&] { return ::getrandom(&id_, sizeof id_, 0); }) != sizeof id_) throw_errno("getrandom");
  const std::lock_guard lock(living.mutex);
  living.heaps.insert(this);
}

Heap::~Heap() {
  const std::lock_guard lock(living.mutex);
  living.heaps.erase(this);
}

/// In a forked child. Its own child copies its pages, which are private already.
void Heap::make_private() noexcept {
  if (!std::exchange(private_, true)) map_.make_private(file_.get());
}

std::byte* Heap::allocate(size_t bytes) {
  const size_t alignment = bytes >= kHugePage ? kHugePage : kAlignment;
  if (bytes <= map_.bytes()) {
    const size_t wanted = round_up(bytes == 0 ? 1 : bytes, kAlignment);
    if (const std::optional<size_t> offset = take(wanted, alignment)) return map_.base() + *offset;
  }
  throw ResourceError("the registered heap (" + std::to_string(map_.bytes() >> 20) + " MiB) has no room for " +
                      std::to_string(bytes) + " bytes; free registered tensors or raise RINGLET_HEAP_MIB");
}

std::optional<size_t> Heap::take(size_t bytes, size_t alignment) {
  std::optional<size_t> offset = ranges_.take(bytes, alignment);
  if (!offset && free_unused()) offset = ranges_.take(bytes, alignment);
  if (const auto drop = drop_cached_.load(); !offset && drop != nullptr && drop())
    offset = ranges_.take(bytes, alignment);
  return offset;
}

bool Heap::free_unused() noexcept {
  const std::lock_guard lock(mutex_);
  return std::erase_if(retired_, [this](const Retired& each) {
           if (!each.unused()) return false;
           free(each.pointer);
           return true;
         }) > 0;
}

void Heap::free_when(Retirement retirement) noexcept {
  if (owner_ != this_process()) return;
  {
    const std::lock_guard lock(mutex_);
    retired_.splice(retired_.end(), retirement);
  }
  free_unused();
}

std::atomic<uint64_t>& Heap::take_counter() {
  using Counter = std::atomic<uint64_t>;
  std::unique_lock lock(mutex_);
  while (counters_.empty()) {
    lock.unlock();
    std::byte* made = allocate(kCounters * sizeof(Counter));  // never freed
    lock.lock();
    for (size_t i = 0; i < kCounters; ++i) counters_.push_back(new (made + i * sizeof(Counter)) Counter(0));
  }
  Counter& counter = *counters_.back();
  counters_.pop_back();
  return counter;
}

void Heap::drop_counter(std::atomic<uint64_t>& counter) noexcept {
  if (owner_ != this_process()) return;
  counter.fetch_add(1, std::memory_order_release);
  const std::lock_guard lock(mutex_);
  counters_.push_back(&counter);
}

void Heap::discard(std::byte* pointer, size_t bytes) noexcept {
  if (owner_ != this_process()) return;  // the pages belong to the parent, too
  repeated([&] {
    return ::fallocate(file_.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                       static_cast<off_t>(pointer - map_.base()), static_cast<off_t>(bytes));
  });
}

void Heap::free(std::byte* pointer) noexcept {
  if (owner_ != this_process()) return;  // a forked child freed its copy of a tensor; the parent still uses it
  const auto offset = static_cast<size_t>(pointer - map_.base());
  // Before the range can be taken again.
  if (const size_t length = ranges_.length(offset); length >= kReturnBytes) discard(pointer, length);
  ranges_.give_back(offset);
}

Descriptor Heap::read_only_descriptor() const {
  const std::string path = "/proc/self/fd/" + std::to_string(file_.get());
  Descriptor copy(repeated([&] { return ::open(path.c_str(), O_RDONLY | O_CLOEXEC); }));
  if (!copy.valid()) throw_errno("cannot reopen the registered heap read-only", "check that /proc is mounted");
  return copy;
}

}  // namespace ringlet
