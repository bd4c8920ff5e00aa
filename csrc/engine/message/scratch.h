// A pool of memory blocks for messages that have arrived and are not combined yet. take() returns the block that was
// returned last, because that block is still in the cache.
//
// Ownership: owns all blocks. Thread safety: one thread at a time.
#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>
#include <vector>

namespace ringlet {

class Scratch {
 public:
  /// A block of the size that resize() has set.
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

  /// Sets the size of blocks. All blocks must have been returned, or are not used any more. Larger blocks are kept.
  void resize(size_t bytes) {
    if (bytes <= bytes_ && free_.size() == blocks_.size()) return;
    free_.clear();
    blocks_.clear();
    bytes_ = std::max(bytes, bytes_);
  }

 private:
  size_t bytes_ = 0;
  std::vector<std::unique_ptr<std::byte[]>> blocks_;
  std::vector<std::byte*> free_;  // take() gives the last block
};

}  // namespace ringlet
