#include "schedule/relabel.h"

namespace ringlet {
namespace {

/// Appends a step on blocks, cut between blocks that are no longer neighbours. all_to_all has two rows of blocks.
void append(std::vector<Step>& steps, const Step& step, const std::vector<int>& rank_at) {
  const int world = static_cast<int>(rank_at.size());
  const auto moved = [&](int chunk) { return chunk < world ? rank_at[chunk] : world + rank_at[chunk - world]; };
  const bool copies = step.verb == Verb::copy;
  for (int i = 0, n = 0; i < step.count; i += n) {
    const int first = moved(step.first + i);
    for (n = 1; !copies && i + n < step.count && moved(step.first + i + n) == first + n;) ++n;
    steps.push_back({step.verb, copies ? moved(step.peer + i) : step.peer, first, n});
  }
}

}  // namespace

Schedule relabelled(const Schedule& schedule, Collective collective, const Numbering& numbering) {
  const bool in_blocks = !is_divided(collective) && collective != Collective::barrier;
  Schedule result(schedule.parts);
  for (const Round& round : schedule.rounds) {
    std::vector<Step>& steps = result.round().steps;
    for (Step step : round.steps) {
      if (step.verb != Verb::copy) step.peer = numbering.rank_at[step.peer];
      if (in_blocks) {
        append(steps, step, numbering.rank_at);
      } else {
        steps.push_back(step);
      }
    }
  }
  return result;
}

}  // namespace ringlet
