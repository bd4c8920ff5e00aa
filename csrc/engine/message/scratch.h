// A pool of memory blocks: for messages that have arrived and are not combined yet, or, in registered memory, for
// messages that a peer is to read. take() returns the block that was returned last, because that block is still in the
// cache.
//
// Ownership: owns all blocks, and keeps the heap. Thread safety: one thread at a time.
#pragma once

#include <algorithm>
#include <cstddef>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "memory/heap.h"

namespace ringlet {

class Scratch {
 public:
  /// The blocks lie in that heap; null: in memory of this process alone.
  explicit Scratch(std::shared_ptr<Heap> heap = nullptr) : heap_(std::move(heap)) {}

  /// A block of the size that resize() has set.
  std::byte* take() {
    if (free_.empty()) {
      if (free_.capacity() == blocks_.size()) free_.reserve(2 * blocks_.size() + 1);  // so that give() needs no memory
      blocks_.push_back(make());
      return blocks_.back().get();
    }
    std::byte* block = free_.back();
    free_.pop_back();
    return block;
  }
  void give(std::byte* block) noexcept { free_.push_back(block); }

  /// Sets the size of blocks. All blocks must have been returned, or are not used any more. Larger blocks are kept.
  void resize(size_t bytes) {
    if (bytes <= bytes_ && free_.size() == blocks_.size()) return;
    free_.clear();
    blocks_.clear();
    bytes_ = std::max(bytes, bytes_);
  }

 private:
  using Block = std::unique_ptr<std::byte[], std::function<void(std::byte*)>>;

  Block make() const {
    if (heap_ == nullptr) return {new std::byte[bytes_], std::default_delete<std::byte[]>()};
    return {heap_->allocate(bytes_), [heap = heap_.get()](std::byte* block) { heap->free(block); }};
  }

  std::shared_ptr<Heap> heap_;
  size_t bytes_ = 0;
  std::vector<Block> blocks_;
  std::vector<std::byte*> free_;  // take() gives the last block
};

}  // namespace ringlet
