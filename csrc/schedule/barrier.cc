// The dissemination barrier: in round k a rank tells rank + 2^k that it has arrived, and all ranks that it knows of.
//
//   world 5   after round 0: r, r-1     round 1: r .. r-3     round 2: everybody
//
// Rounds: ceil(log2 world). Bytes: none; messages are empty, and their arrival is the information.
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
