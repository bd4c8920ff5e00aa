// Every rank exchanges with every other at once. One shot: every rank gets all data and combines them. Two shots: every
// rank gets one chunk from each rank, combines them, and sends the result to each rank.
//
//   two_shot, world 3     0: 0 . .     0: 0 - -     0: 0 1 2      rank: chunks
//                         1: . 1 .     1: - 1 -     1: 0 1 2      . given away   - stale
//                         2: . . 2     2: - - 2     2: 0 1 2
//
// Rounds: one_shot 1, two_shot 2, its halves and pairwise 1. Bytes sent per rank: one_shot S (world-1), two_shot
// 2S (world-1)/world, its halves and pairwise half of that. Sums: one n-ary reduction in rank order, rounded once;
// one tree for all elements. Peers are taken from the next rank on, so that not all ranks start with rank 0.
// Source: the direct algorithms of shared memory and NVLink systems, e.g. DeepSpeed csrc/cpu/comm/shm.cpp.
#include "schedule/algorithms.h"
#include "schedule/compose.h"

namespace ringlet {
namespace {

int peer_after(const RankInfo& info, int distance) { return (info.rank + distance) % info.world; }

}  // namespace

Schedule one_shot_all_reduce(const RankInfo& info) {
  Schedule schedule(/*parts=*/1);
  if (info.world == 1) return schedule;
  Round& round = schedule.round();
  for (int i = 1; i < info.world; ++i) round.send(peer_after(info, i), {0, 1});
  for (int i = 1; i < info.world; ++i) round.reduce(peer_after(info, i), {0, 1});
  return schedule;
}

Schedule two_shot_reduce_scatter(const RankInfo& info) {
  Schedule schedule(info.world);
  if (info.world == 1) return schedule;
  Round& round = schedule.round();
  for (int i = 1; i < info.world; ++i) round.send(peer_after(info, i), {peer_after(info, i), 1});
  for (int i = 1; i < info.world; ++i) round.reduce(peer_after(info, i), {info.rank, 1});
  return schedule;
}

Schedule two_shot_all_gather(const RankInfo& info) { return backwards(two_shot_reduce_scatter(info)); }

Schedule two_shot_all_reduce(const RankInfo& info) { return there_and_back(two_shot_reduce_scatter(info)); }

Schedule pairwise_all_to_all(const RankInfo& info) {
  Schedule schedule(/*parts=*/2 * info.world);
  Round& round = schedule.round();
  for (int i = 1; i < info.world; ++i) round.send(peer_after(info, i), {peer_after(info, i), 1});
  for (int i = 1; i < info.world; ++i) round.recv(peer_after(info, i), {info.world + peer_after(info, i), 1});
  round.copy({info.rank, 1}, info.world + info.rank);
  return schedule;
}

}  // namespace ringlet
