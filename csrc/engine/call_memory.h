// Where the chunks of one call lie in the caller's tensors, segment by segment: the same piece of every chunk.
//
// Ownership: the call and its plan outlive it. Thread safety: const.
#pragma once

#include <algorithm>

#include "base/partition.h"
#include "engine/call.h"
#include "engine/message/message_plan.h"

namespace ringlet {

class CallMemory {
 public:
  CallMemory(const Call& call, const MessagePlan& plan)
      : call_(call),
        plan_(plan),
        divided_(is_divided(call.collective)),
        size_(element_size(call.dtype)),
        partition_(call.count, static_cast<size_t>(plan.parts)) {}

  size_t element_bytes() const { return size_; }
  size_t longest_chunk() const { return divided_ ? partition_.size(0) : call_.count; }

  /// Of a chunk from its element `begin` on, at most `width`.
  size_t elements(int chunk, size_t begin, size_t width) const {
    const size_t length = call_.blocks != nullptr ? call_.blocks->counts[chunk]
                          : divided_              ? partition_.size(chunk)
                                                  : call_.count;
    return length <= begin ? 0 : std::min(width, length - begin);
  }
  const std::byte* input(int chunk, size_t begin) const {
    if (call_.blocks != nullptr) return call_.blocks->inputs[chunk - plan_.input.first] + begin * size_;
    return call_.input + offset(chunk, plan_.input.first, begin);
  }
  std::byte* output(int chunk, size_t begin) const {
    if (call_.blocks != nullptr) return call_.blocks->outputs[chunk - plan_.output.first] + begin * size_;
    return call_.output + offset(chunk, plan_.output.first, begin);
  }

 private:
  size_t offset(int chunk, int first, size_t begin) const {
    return ((divided_ ? partition_.offset(chunk) : static_cast<size_t>(chunk - first) * call_.count) + begin) * size_;
  }

  const Call& call_;
  const MessagePlan& plan_;
  bool divided_;
  size_t size_;
  Partition partition_;
};

inline bool holds(const Chunks& range, int chunk) { return chunk >= range.first && chunk < range.first + range.count; }

}  // namespace ringlet
