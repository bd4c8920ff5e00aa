// Which ranges of [0, bytes) are taken: the first free one that fits is, and neighbours that are freed become one.
//
// Ownership: numbers only. Thread safety: all calls from any thread.
#pragma once

#include <cstddef>
#include <map>
#include <mutex>
#include <optional>

namespace ringlet {

class Ranges {
 public:
  explicit Ranges(size_t bytes) : bytes_(bytes) { free_.emplace(0, bytes); }

  size_t bytes() const { return bytes_; }
  size_t taken_bytes() const;

  /// Where `bytes` begin, at a multiple of `alignment`; none where there is no room.
  std::optional<size_t> take(size_t bytes, size_t alignment);
  /// How long the range was that began there; 0 where none did.
  size_t length(size_t offset) const;
  void give_back(size_t offset);

 private:
  const size_t bytes_;
  mutable std::mutex mutex_;
  std::map<size_t, size_t> free_;   // offset -> bytes, never adjacent; guarded by mutex_
  std::map<size_t, size_t> taken_;  // offset -> bytes; guarded by mutex_
};

}  // namespace ringlet
