// The dissemination barrier: in round k a rank tells rank + 2^k that it, and all it has heard of, have arrived.
//
//   world 5   after round 0: r, r-1     round 1: r .. r-3     round 2: everybody
//
// Rounds: ceil(log2 world). Bytes: none; messages are empty, their arrival is the news.
// Source: Hensgen, Finkel and Manber, "Two algorithms for barrier synchronization", 1988.
#include "schedule/algorithms.h"

namespace ringlet {

Schedule dissemination_barrier(const RankInfo& info) {
  constexpr Chunks kNothing{0, 0};
  Schedule schedule(/*parts=*/1);
  for (int distance = 1; distance < info.world; distance *= 2) {
    schedule.round()
        .send((info.rank + distance) % info.world, kNothing)
        .recv((info.rank - distance + info.world) % info.world, kNothing);
  }
  return schedule;
}

}  // namespace ringlet
