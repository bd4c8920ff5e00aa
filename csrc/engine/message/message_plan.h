// A plan (plan/plan.h) for ranks that send each other messages: what the engine must know of the messages' frames.
//
// The messages between two ranks are numbered in each direction, so they may overtake messages of other segments.
// Thread safety: immutable once made.
#pragma once

#include <unordered_map>
#include <vector>

#include "plan/plan.h"

namespace ringlet {

struct MessagePlan : Plan {
  int most_chunks = 0;  // of one message
  int most_held =
      0;  // chunks of scratch and work that a segment may take, on the rank that takes most: the same on all ranks
  bool works = false;  // some written chunks are not part of the output
  std::vector<int> peers;
  std::unordered_map<int, std::vector<int>> from;  // by peer and index: which of `received`
};

MessagePlan make_message_plan(const Algorithm& algorithm, const RankInfo& info);

}  // namespace ringlet
