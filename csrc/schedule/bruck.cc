// Bruck's all-gather, for every world in ceil(log2 world) exchanges with the ranks 1, 2, 4, ... further on.
//
// A rank gives the next blocks it has, its own first, to the rank 2^k before it, which then has twice as many in a row;
// in the last round only the missing blocks.
//
// Rounds: ceil(log2 world). Bytes sent per rank: S (world-1)/world.
// Source: Bruck, Ho, Kipnis, Upfal and Weathersby, "Efficient Algorithms for All-to-All Communications in Multiport
// Message-Passing Systems", IEEE TPDS 8(11), 1997, section 4.
#include <algorithm>

#include "schedule/algorithms.h"
#include "schedule/chunk_list.h"

namespace ringlet {

Schedule bruck_all_gather(const RankInfo& info) {
  const int world = info.world;
  Schedule schedule(world);
  for (int distance = 1; distance < world; distance *= 2) {
    const int to = (info.rank - distance + world) % world, from = (info.rank + distance) % world;
    const int count = std::min(distance, world - distance);
    Round& round = schedule.round();
    add_range(round, &Round::send, to, {info.rank, count}, world);
    add_range(round, &Round::recv, from, {from, count}, world);
  }
  return schedule;
}

}  // namespace ringlet
