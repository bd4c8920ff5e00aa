// The chain: the root gives to the next rank, that one to the next, and so on; a reduce comes in from the far end. One
// segment takes as long as it can; a message of many segments is a pipeline, in which every rank takes one segment in
// while it passes the one before it on. Segments are the engines', so the schedule knows nothing of them.
//
//   root -> root+1 -> root+2 -> ... -> root-1       reduce: the same edges backwards
//
// Rounds: 2. Bytes sent: S at every rank but the last. Sums: one tree, a chain of world-1 additions.
// Source: the pipelined chain of van de Geijn's and Open MPI's broadcasts; Chan, Heimlich, Purkayastha and van de Geijn,
// "Collective communication: theory, practice, and experience", Concurrency and Computation 19(13), 2007.
#include "schedule/algorithms.h"
#include "schedule/compose.h"

namespace ringlet {

Schedule chain_reduce(const RankInfo& info) {
  const int next = (info.rank + 1) % info.world, before = (info.rank + info.world - 1) % info.world;
  Schedule schedule(/*parts=*/1);
  if (next != info.root) schedule.round().reduce(next, {0, 1});
  if (info.rank != info.root) schedule.round().send(before, {0, 1});
  return schedule;
}

Schedule chain_broadcast(const RankInfo& info) { return backwards(chain_reduce(info)); }

}  // namespace ringlet
