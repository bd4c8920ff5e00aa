// Registered memory: one sparse memfd per process, which peers map whole and read-only, once.
//
// Contract: an address in the heap is named by its offset in every process, so allocating is local: no peer takes
// part. Pages exist from first touch on. Nothing is ever in /dev/shm: the file has no name and dies with its last
// process.
// Ownership: allocate/free pairs; a forked child must not allocate from or free into its parent's heap, so process()
// gives it a heap of its own. Thread safety: all calls may come from any thread.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "memory/mapping.h"
#include "memory/ranges.h"

namespace ringlet {

class Heap {
 public:
  /// This process's heap, made on first use. Its size is RINGLET_HEAP_MIB, or the machine's memory; only what is
  /// touched counts.
  static const std::shared_ptr<Heap>& process();

  explicit Heap(size_t bytes);

  /// At least `bytes`, zeroed where never used before, aligned to 64 (to 2 MiB from 2 MiB on). Throws SystemError when
  /// full.
  std::byte* allocate(size_t bytes);
  void free(std::byte* pointer) noexcept;

  /// Frees a block once `unused` says that no peer reads it any more. Nobody waits for that: the heap asks again when
  /// the next such block comes, and when it is full. `unused` must not call the heap.
  void free_when(std::byte* pointer, std::function<bool()> unused) noexcept;

  /// Asks now, of all such blocks. Whether one was freed.
  bool free_unused() noexcept;

  /// A counter in the heap whose place only ever holds counters (type-stable memory), and which no value is given
  /// twice: who reads it after drop_counter() finds that it has moved on, and never other data.
  std::atomic<uint64_t>& take_counter();
  void drop_counter(std::atomic<uint64_t>& counter) noexcept;

  /// Gives the pages of a range back to the system; the range stays allocated and reads as zeros.
  void discard(std::byte* pointer, size_t bytes) noexcept;

  /// Offset of [pointer, pointer + bytes) where all of it lies in the heap.
  std::optional<uint64_t> locate(const void* pointer, size_t bytes) const noexcept {
    const auto* p = static_cast<const std::byte*>(pointer);
    if (p < map_.base() || p + bytes > map_.base() + map_.bytes()) return std::nullopt;
    return static_cast<uint64_t>(p - map_.base());
  }

  /// A new descriptor of the same memory through which nobody can write.
  Descriptor read_only_descriptor() const;

  std::byte* base() const { return map_.base(); }
  size_t bytes() const { return map_.bytes(); }
  uint64_t id() const { return id_; }
  size_t allocated_bytes() const { return ranges_.taken_bytes(); }

 private:
  struct Retired {
    std::byte* pointer;
    std::function<bool()> unused;
  };

  std::optional<size_t> take(size_t bytes, size_t alignment);

  Descriptor file_;
  Mapping map_;
  uint64_t id_;
  int owner_;  // the process that may allocate
  Ranges ranges_;
  std::mutex mutex_;
  std::vector<Retired> retired_;                  // guarded by mutex_
  std::vector<std::atomic<uint64_t>*> counters_;  // not in use; guarded by mutex_
};

}  // namespace ringlet
