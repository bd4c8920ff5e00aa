// The free and taken ranges of [0, bytes). take() uses the first free range that fits; free neighbours become one.
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

  /// The offset of a range of `bytes`, a multiple of `alignment`; none if there is no room.
  std::optional<size_t> take(size_t bytes, size_t alignment);
  /// The length of the range that begins there; 0 if none does.
  size_t length(size_t offset) const;
  void give_back(size_t offset);

 private:
  const size_t bytes_;
  mutable std::mutex mutex_;
  std::map<size_t, size_t> free_;   // offset -> bytes, never adjacent; guarded by mutex_
  std::map<size_t, size_t> taken_;  // offset -> bytes; guarded by mutex_
};

}  // namespace ringlet
