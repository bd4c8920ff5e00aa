// The circulant graph: as few rounds as a butterfly and as few bytes as a ring, for every world.
//
// Let block i of a rank be chunk (rank + i) mod world. A rank begins with world live blocks. Each round halves them,
// rounding up: with s = ceil(live / 2), blocks s .. live-1 go to rank + s, where they are blocks 0 .. live-s-1,
// and are combined there. At the end block 0, chunk `rank`, is complete.
//
//   world 5, rank 0      live   s    sends to            reduces from
//   round 0                 5   3    chunks 3 4 -> 3     chunks 0 1 <- 2
//   round 1                 3   2    chunk  2   -> 2     chunk  0   <- 3
//   round 2                 2   1    chunk  1   -> 1     chunk  0   <- 4
//
// The all-gather is the same in reverse order with sends and receives exchanged. A range of blocks that passes the
// last chunk becomes two steps, cut at the same place on both sides.
// Rounds: ceil(log2 world) each. Bytes sent per rank: S (world-1)/world each. Sums: depth <= ceil(log2 world).
// Source: Träff, "Optimal, Non-pipelined Reduce-scatter and Allreduce Algorithms", arXiv 2410.14234.
#include "schedule/algorithms.h"
#include "schedule/chunk_list.h"
#include "schedule/compose.h"

namespace ringlet {

Schedule circulant_reduce_scatter(const RankInfo& info) {
  Schedule schedule(info.world);
  for (int live = info.world; live > 1;) {
    const int skip = (live + 1) / 2, count = live - skip;
    const int to = (info.rank + skip) % info.world, from = (info.rank - skip + info.world) % info.world;
    Round& round = schedule.round();
    add_range(round, &Round::send, to, {to, count}, info.world);
    add_range(round, &Round::reduce, from, {info.rank, count}, info.world);
    live = skip;
  }
  return schedule;
}

Schedule circulant_all_gather(const RankInfo& info) { return backwards(circulant_reduce_scatter(info)); }

Schedule circulant_all_reduce(const RankInfo& info) { return there_and_back(circulant_reduce_scatter(info)); }

}  // namespace ringlet
