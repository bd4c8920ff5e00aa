#include "schedule/relabel.h"

namespace ringlet {
namespace {

/// Chunks that belong to positions; all_to_all has two rows of them.
class BlockOrder {
 public:
  explicit BlockOrder(const Numbering& numbering)
      : rank_at_(numbering.rank_at), world_(static_cast<int>(numbering.rank_at.size())) {}

  int moved(int chunk) const { return chunk < world_ ? rank_at_[chunk] : world_ + rank_at_[chunk - world_]; }

  /// How many of `count` chunks from `first` on still lie side by side.
  int together(int first, int count) const {
    int n = 1;
    while (n < count && moved(first + n) == moved(first) + n) ++n;
    return n;
  }

 private:
  const std::vector<int>& rank_at_;
  int world_;
};

/// Appends a step on blocks, cut between blocks that are no longer neighbours.
void append(std::vector<Step>& steps, const Step& step, const BlockOrder& blocks) {
  const bool copies = step.verb == Verb::copy;
  for (int i = 0, n = 0; i < step.count; i += n) {
    n = copies ? 1 : blocks.together(step.first + i, step.count - i);
    steps.push_back({step.verb, copies ? blocks.moved(step.peer + i) : step.peer, blocks.moved(step.first + i), n});
  }
}

}  // namespace

Schedule relabelled(const Schedule& schedule, Collective collective, const Numbering& numbering) {
  const bool in_blocks = !is_divided(collective) && collective != Collective::barrier;
  const BlockOrder blocks(numbering);
  Schedule result(schedule.parts);
  for (const Round& round : schedule.rounds) {
    std::vector<Step>& steps = result.round().steps;
    for (Step step : round.steps) {
      if (step.verb != Verb::copy) step.peer = numbering.rank_at[step.peer];
      if (in_blocks) {
        append(steps, step, blocks);
      } else {
        steps.push_back(step);
      }
    }
  }
  return result;
}

}  // namespace ringlet
