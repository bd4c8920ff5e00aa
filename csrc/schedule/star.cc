// One rank in the middle serves all others directly: a parameter server.
//
//   1   2        1   2
//    \ /          ^ ^        reduce or gather: all into the root
//     0            \|        broadcast or scatter: out of the root to all
//    / \            0 -> 3   all-reduce: in, then out
//   4   3
//
// Rounds: 1; all-reduce 2. Bytes sent: all-reduce and broadcast S (world-1) at the root; reduce S at every other rank;
// gather one chunk at every other rank; scatter world-1 chunks at the root. Sums: one n-ary reduction in
// rank order, rounded once. The root's link carries everything: a yardstick over a network, and a good
// choice on shared memory, because peers read the root's memory at the same time.
// Source: Li et al., "Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014; MPI's linear forms.
#include "schedule/algorithms.h"
#include "schedule/compose.h"

namespace ringlet {
namespace {

/// All into the root, which takes what comes from the next rank on: whole buffers, or one chunk of each rank.
Schedule into_root(const RankInfo& info, int parts, Round& (Round::*take)(int, Chunks)) {
  Schedule schedule(parts);
  if (info.world == 1) return schedule;
  const auto chunk_of = [parts](int rank) { return Chunks{parts == 1 ? 0 : rank, 1}; };
  Round& round = schedule.round();
  if (info.rank != info.root) {
    round.send(info.root, chunk_of(info.rank));
    return schedule;
  }
  for (int i = 1; i < info.world; ++i) {
    const int peer = (info.rank + i) % info.world;
    (round.*take)(peer, chunk_of(peer));
  }
  return schedule;
}

}  // namespace

Schedule star_reduce(const RankInfo& info) { return into_root(info, 1, &Round::reduce); }

Schedule star_broadcast(const RankInfo& info) { return backwards(star_reduce(info)); }

Schedule star_all_reduce(const RankInfo& info) {
  return there_and_back(star_reduce({info.rank, info.world, /*root=*/0}));
}

Schedule linear_gather(const RankInfo& info) { return into_root(info, info.world, &Round::recv); }

Schedule linear_scatter(const RankInfo& info) { return backwards(linear_gather(info)); }

}  // namespace ringlet
