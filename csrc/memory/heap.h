// Registered memory: one sparse memfd per process, which each peer maps once, whole and read-only.
//
// Contract: an address in the heap is named by its offset, the same in every process. So an allocation is local: no
// peer takes part. A page exists from its first touch on. Nothing is in /dev/shm: the file has no name and ends with
// its last process.
// Ownership: allocate/free pairs. A forked child must not use its parent's heap: process() gives it a heap of its own.
// It still has its parent's tensors. It sees what the parent writes into a page, until it writes into that page itself:
// then it has its own copy, which the parent does not see.
// Thread safety: all calls may come from any thread.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "memory/mapping.h"
#include "memory/ranges.h"

namespace ringlet {

class Heap {
 public:
  /// The heap of this process, made at first use. Its size is RINGLET_HEAP_MIB, or the machine's memory. Only pages
  /// that are touched take memory.
  static const std::shared_ptr<Heap>& process();

  explicit Heap(size_t bytes);
  ~Heap();
  Heap(const Heap&) = delete;
  Heap& operator=(const Heap&) = delete;

  /// At least `bytes`, aligned to 64 bytes (to 2 MiB from 2 MiB on). Memory that was never used before is zero. Throws
  /// ResourceError if the heap is full.
  std::byte* allocate(size_t bytes);
  void free(std::byte* pointer) noexcept;

  /// A block, and whether no peer reads it any more. `unused` must not call the heap.
  struct Retired {
    std::byte* pointer;
    std::function<bool()> unused;
  };
  using Retirement = std::list<Retired>;  // made early: what ends a group must not need memory
  /// Frees blocks when they are unused. The call does not wait for that: the heap asks again at the next such call, and
  /// when it is full.
  void free_when(Retirement retirement) noexcept;

  /// Checks all blocks of free_when() now. Returns whether one was freed.
  bool free_unused() noexcept;

  /// `drop` frees blocks that somebody keeps for later allocations, and returns whether there were any. A full heap calls
  /// it.
  void when_full(bool (*drop)()) { drop_cached_ = drop; }

  /// A counter in the heap. Its place holds only counters (type-stable memory), and it never has the same value twice.
  /// A peer that reads it after drop_counter() sees that it has moved on, and never other data.
  std::atomic<uint64_t>& take_counter();
  void drop_counter(std::atomic<uint64_t>& counter) noexcept;

  /// Returns the pages of a range to the system. The range stays allocated and reads as zeros.
  void discard(std::byte* pointer, size_t bytes) noexcept;

  /// The offset of [pointer, pointer + bytes) if all of it is in the heap.
  std::optional<uint64_t> locate(const void* pointer, size_t bytes) const noexcept {
    const auto* p = static_cast<const std::byte*>(pointer);
    if (p < map_.base() || p + bytes > map_.base() + map_.bytes()) return std::nullopt;
    return static_cast<uint64_t>(p - map_.base());
  }

  /// A new descriptor of the same memory, for reading only.
  Descriptor read_only_descriptor() const;

  std::byte* base() const { return map_.base(); }
  size_t bytes() const { return map_.bytes(); }
  uint64_t id() const { return id_; }
  size_t allocated_bytes() const { return ranges_.taken_bytes(); }

 private:
  struct Living;
  static Living& living;

  std::optional<size_t> take(size_t bytes, size_t alignment);
  void make_private() noexcept;

  Descriptor file_;
  Mapping map_;
  uint64_t id_;
  int owner_;             // the process that may allocate
  bool private_ = false;  // what this process writes reaches no other: it is a forked child
  std::atomic<bool (*)()> drop_cached_{nullptr};
  Ranges ranges_;
  std::mutex mutex_;
  std::list<Retired> retired_;                    // guarded by mutex_
  std::vector<std::atomic<uint64_t>*> counters_;  // not in use; guarded by mutex_
};

}  // namespace ringlet
