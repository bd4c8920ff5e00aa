#include "memory/ranges.h"

#include <iterator>

#include "base/partition.h"

namespace ringlet {

size_t Ranges::taken_bytes() const {
  const std::lock_guard lock(mutex_);
  size_t total = 0;
  for (const auto& [offset, bytes] : taken_) total += bytes;
  return total;
}

std::optional<size_t> Ranges::take(size_t bytes, size_t alignment) {
  const std::lock_guard lock(mutex_);
  for (auto range = free_.begin(); range != free_.end(); ++range) {
    const auto [start, length] = *range;
    const size_t offset = round_up(start, alignment);
    if (offset + bytes > start + length) continue;
    free_.erase(range);
    if (offset > start) free_.emplace(start, offset - start);
    if (const size_t end = offset + bytes; end < start + length) free_.emplace(end, start + length - end);
    taken_.emplace(offset, bytes);
    return offset;
  }
  return std::nullopt;
}

size_t Ranges::length(size_t offset) const {
  const std::lock_guard lock(mutex_);
  const auto range = taken_.find(offset);
  return range == taken_.end() ? 0 : range->second;
}

void Ranges::give_back(size_t offset) {
  const std::lock_guard lock(mutex_);
  const auto range = taken_.find(offset);
  if (range == taken_.end()) return;
  auto [start, length] = *range;
  taken_.erase(range);
  auto next = free_.lower_bound(start);
  if (next != free_.end() && next->first == start + length) {
    length += next->second;
    next = free_.erase(next);
  }
  if (next != free_.begin()) {
    if (const auto before = std::prev(next); before->first + before->second == start) {
      before->second += length;
      return;
    }
  }
  free_.emplace(start, length);
}

}  // namespace ringlet
