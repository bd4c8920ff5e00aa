#include "schedule/relabel.h"

namespace ringlet {
namespace {

/// Chunks that belong to positions; all_to_all has two rows of them.
class Blocks {
 public:
  explicit Blocks(const Numbering& numbering)
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

}  // namespace

Schedule relabelled(const Schedule& schedule, Collective collective, const Numbering& numbering) {
  const bool in_blocks = !is_divided(collective) && collective != Collective::barrier;
  const Blocks blocks(numbering);
  Schedule result(schedule.parts);
  for (const Round& round : schedule.rounds) {
    std::vector<Step>& steps = result.round().steps;
    for (const Step& step : round.steps) {
      const bool copies = step.verb == Verb::copy;
      const int peer = copies ? step.peer : numbering.rank_at[step.peer];
      if (!in_blocks) {
        steps.push_back({step.verb, peer, step.first, step.count});
        continue;
      }
      for (int i = 0, n = 0; i < step.count; i += n) {
        n = copies ? 1 : blocks.together(step.first + i, step.count - i);
        steps.push_back({step.verb, copies ? blocks.moved(peer + i) : peer, blocks.moved(step.first + i), n});
      }
    }
  }
  return result;
}

}  // namespace ringlet
