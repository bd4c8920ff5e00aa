// The butterfly, recursive doubling: in round k, ranks that differ in bit k exchange and combine everything they have.
//
//   0  1  2  3  4  5  6  7
//   \__/  \__/  \__/  \__/     distance 1
//   \__\__/__/  \__\__/__/     distance 2
//   \__\__\__\__/__/__/__/     distance 4
//
// Rounds: log2 world; other worlds fold (schedule/fold.h): floor(log2 world) + 2.
// Bytes sent per rank: S log2 world; if a rank stands in for a folded one, S (floor(log2 world) + 1).
// Sums: one tree of depth ceil(log2 world) for all elements, so bits do not depend on an element's place.
// Source: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", 2005.
#include "schedule/algorithms.h"
#include "schedule/fold.h"

namespace ringlet {

Schedule butterfly_all_reduce(const RankInfo& info) {
  const Fold fold(info);
  Schedule schedule(/*parts=*/1);
  fold.enter(schedule);
  for (int distance = 1; distance < fold.size && !fold.sits_out; distance *= 2) {
    const int peer = fold.rank_of(fold.player ^ distance);
    schedule.round().send(peer, {0, 1}).reduce(peer, {0, 1});
  }
  fold.leave(schedule);
  return schedule;
}

}  // namespace ringlet
