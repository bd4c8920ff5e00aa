// The places and lengths of one call's chunks in a rank's tensors.
//
// Executors cut a call into segments: the same piece of every chunk. So a segment never changes which chunk an element
// belongs to, and the bits of a result depend on the message, not on how an executor cuts it. `begin` is the segment's
// first element in every chunk.
// Ownership: the call's tensors and blocks must outlive it. Thread safety: const.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "base/partition.h"
#include "engine/call.h"

namespace ringlet {

class CallLayout {
 public:
  /// `parts`: of the schedule. Input and output are those of info.rank.
  CallLayout(const Call& call, const RankInfo& info, int parts)
      : blocks_(call.blocks),
        divided_(is_divided(call.collective)),
        size_(element_size(call.dtype)),
        count_(call.count),
        partition_(call.count, static_cast<size_t>(parts)),
        inputs_(input_chunks(call.collective, info, parts)),
        outputs_(output_chunks(call.collective, info, parts)),
        input_(origin(call.input, inputs_)),
        output_(origin(call.output, outputs_)) {}

  bool divided() const { return divided_; }
  size_t element_bytes() const { return size_; }
  const Chunks& inputs() const { return inputs_; }
  const Chunks& outputs() const { return outputs_; }

  /// In elements. A call with blocks says in its count how long the longest is.
  size_t longest_chunk() const { return divided_ ? partition_.size(0) : count_; }
  size_t length(int chunk) const {
    if (blocks_ != nullptr) return blocks_->counts[static_cast<size_t>(chunk)];
    return divided_ ? partition_.size(static_cast<size_t>(chunk)) : count_;
  }
  /// Elements of a chunk in a segment of at most `width` elements.
  size_t elements(int chunk, size_t begin, size_t width) const {
    const size_t all = length(chunk);
    return all <= begin ? 0 : std::min(width, all - begin);
  }

  /// Elements before a chunk, if all chunks of the schedule lay one after the other.
  size_t start(int chunk) const {
    return divided_ ? partition_.offset(static_cast<size_t>(chunk)) : static_cast<size_t>(chunk) * count_;
  }
  /// In bytes from the origin of a tensor.
  size_t offset(int chunk, size_t begin) const { return (start(chunk) + begin) * size_; }
  /// Where chunk 0 of the schedule would lie, if the tensor's first chunk is `held.first`.
  const std::byte* origin(const std::byte* tensor, const Chunks& held) const {
    const size_t before = divided_ ? 0 : static_cast<size_t>(held.first) * count_ * size_;
    return reinterpret_cast<const std::byte*>(reinterpret_cast<uintptr_t>(tensor) - before);
  }

  const std::byte* input(int chunk, size_t begin) const {
    if (blocks_ != nullptr) return blocks_->inputs[static_cast<size_t>(chunk - inputs_.first)] + begin * size_;
    return input_ + offset(chunk, begin);
  }
  std::byte* output(int chunk, size_t begin) const {
    if (blocks_ != nullptr) return blocks_->outputs[static_cast<size_t>(chunk - outputs_.first)] + begin * size_;
    return const_cast<std::byte*>(output_) + offset(chunk, begin);
  }
  /// Where chunk 0 of the schedule lies or would lie.
  const std::byte* input_origin() const { return input_; }
  const std::byte* output_origin() const { return output_; }

 private:
  const Blocks* blocks_;
  bool divided_;
  size_t size_;
  size_t count_;
  Partition partition_;
  Chunks inputs_, outputs_;
  const std::byte* input_;
  const std::byte* output_;
};

}  // namespace ringlet
