// Recursive multiplying: the butterfly with four partners at a time instead of two, so that groups that know each
// other's contributions grow by a factor of four a round (by two in the last one, if the world requires it).
//
//   world 16, round 0   0 1 2 3 | 4 5 6 7 | ...      all of a group exchange everything; n-ary reductions in rank order
//             round 1   0 4 8 12 | 1 5 9 13 | ...
//
// Partial sums are combined in the order of the ranks that hold them, which must be alike in all groups: so positions are
// ranks, whatever the hosts. Rounds: ceil(log4 world) for powers of two; other worlds fold (schedule/fold.h), with q ranks left: ceil(log4 q) + 2.
// Bytes sent per rank: 3S a round, S in one of two; if a rank stands in for a folded one, S more. Sums: one tree
// of depth ceil(log4 q), one more if ranks fold. Source: Ruefenacht, Bull and Booth, "Generalisation of recursive
// doubling for AllReduce: Now with simulation", Parallel Computing 69, 2017.
#include <algorithm>

#include "schedule/algorithms.h"
#include "schedule/fold.h"

namespace ringlet {

Schedule recursive_multiplying_all_reduce(const RankInfo& info) {
  constexpr int kMostAtOnce = 4;
  const Fold fold(info);
  Schedule schedule(/*parts=*/1);
  fold.enter(schedule);
  for (int distance = 1; distance < fold.size && !fold.sits_out; distance *= kMostAtOnce) {
    const int group = std::min(kMostAtOnce, fold.size / distance);
    const int index = fold.player / distance % group;
    const auto peer = [&](int i) { return fold.rank_of(fold.player + ((index + i) % group - index) * distance); };
    Round& round = schedule.round();
    for (int i = 1; i < group; ++i) round.send(peer(i), {0, 1});
    for (int i = 1; i < group; ++i) round.reduce(peer(i), {0, 1});
  }
  fold.leave(schedule);
  return schedule;
}

}  // namespace ringlet
