// Blocks of memory for what arrived and is not combined yet; given back blocks are used again, warm in the cache.
//
// Ownership: all blocks, until the pool goes. Thread safety: one thread at a time.
#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>
#include <vector>

namespace ringlet {

class Scratch {
 public:
  /// At least `bytes`, for as long as blocks of one size are asked for: resize() when that changes.
  std::byte* take() {
    if (free_.empty()) {
      blocks_.push_back(std::make_unique_for_overwrite<std::byte[]>(bytes_));
      return blocks_.back().get();
    }
    std::byte* block = free_.back();
    free_.pop_back();
    return block;
  }
  void give(std::byte* block) { free_.push_back(block); }

  /// What take() gives from now on; all blocks must have been given back, or be forgotten. Larger ones are kept.
  void resize(size_t bytes) {
    if (bytes <= bytes_ && free_.size() == blocks_.size()) return;
    free_.clear();
    blocks_.clear();
    bytes_ = std::max(bytes, bytes_);
  }

 private:
  size_t bytes_ = 0;
  std::vector<std::unique_ptr<std::byte[]>> blocks_;
  std::vector<std::byte*> free_;  // the last given first
};

}  // namespace ringlet
