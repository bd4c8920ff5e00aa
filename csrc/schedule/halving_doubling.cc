// The butterfly with halves: going in, each exchange gives away one half of what is left and combines the other;
// going out, the same exchanges in reverse order put the finished halves together.
//
//   world 4, chunks that a rank still works on        after distance 1      after distance 2
//                                            rank 0   0 1                   0
//                                            rank 1       2 3                   2
//                                            rank 2   0 1                     1
//                                            rank 3       2 3                     3
//
// Near first, as above: the largest exchanges are between neighbouring ranks, which share a host when ranks are
// numbered host after host. Far first: distance 2 comes before 1, the largest exchanges are between ranks half the
// world apart, which share a host when ranks are numbered round robin over the hosts.
// Rounds: 2 log2 world; other worlds fold (schedule/fold.h): 2 floor(log2 world) + 2. Bytes sent per rank, with q the
// power of two: 2S (q-1)/q; if a rank stands in for a folded one, S more. Sums: one tree, depth ceil(log2 world).
// Source: Rabenseifner, "Optimization of collective reduction operations", ICCS 2004.
#include "schedule/algorithms.h"
#include "schedule/compose.h"
#include "schedule/fold.h"

namespace ringlet {
namespace {

Schedule exchanged(const RankInfo& info, bool near_first) {
  const Fold fold(info);
  Schedule schedule(fold.size);
  fold.enter(schedule);
  Chunks left{0, fold.size};
  for (int near = 1, far = fold.size / 2; far > 0 && !fold.sits_out; near *= 2, far /= 2) {
    const int distance = near_first ? near : far;
    const int peer = fold.rank_of(fold.player ^ distance);
    const int half = left.count / 2;
    const int kept = (fold.player & distance) != 0 ? half : 0;  // the player with the distance's bit: the upper half
    schedule.round().send(peer, {left.first + half - kept, half}).reduce(peer, {left.first + kept, half});
    left = {left.first + kept, half};
  }
  return there_and_back(std::move(schedule));
}

}  // namespace

Schedule halving_doubling_near(const RankInfo& info) { return exchanged(info, true); }
Schedule halving_doubling_far(const RankInfo& info) { return exchanged(info, false); }

}  // namespace ringlet
