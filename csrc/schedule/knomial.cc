// The binomial tree ("tree") and the k-nomial tree with k = 4 ("knomial"), for any root. Nodes are ranks counted from
// the root; a node's parent is the node without its lowest digit to base k that is not zero.
//
//   k = 2    0 -- 1              k = 4    0 -- 1  2  3           reduce: digit by digit from the lowest, the nodes
//            |-- 2 -- 3                   |-- 4 -- 5  6  7       that have it give what they have to their parent,
//            `-- 4 -- 5                   |-- 8 -- 9 10 11       which combines up to k - 1 at once
//                `-- 6 -- 7               `- 12 -- 13 14 15      broadcast: backwards, highest digit first
//
// Rounds: ceil(logk world) at the root. Bytes sent: broadcast S times the root's children, up to k - 1 a round; reduce S
// at every other rank. Sums: one tree of depth ceil(logk world), n-ary reductions in rank order.
// Source: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", 2005; MPICH's
// and UCC's k-nomial trees; Bruck et al., IEEE TPDS 8(11), 1997, for k ports.
#include "schedule/algorithms.h"
#include "schedule/compose.h"

namespace ringlet {
namespace {

constexpr Chunks kWhole{0, 1};

Schedule reduce(const RankInfo& info, int base) {
  const int node = (info.rank - info.root + info.world) % info.world;
  const auto rank_of = [&](int other) { return (info.root + other) % info.world; };
  Schedule schedule(/*parts=*/1);
  int weight = 1;  // of the node's lowest digit that is not zero; the root's: past the world
  for (; weight < info.world && node / weight % base == 0; weight *= base) {
    if (node + weight >= info.world) continue;
    Round& round = schedule.round();
    for (int digit = 1; digit < base && node + digit * weight < info.world; ++digit) {
      round.reduce(rank_of(node + digit * weight), kWhole);
    }
  }
  if (node != 0) schedule.round().send(rank_of(node - node / weight % base * weight), kWhole);
  return schedule;
}

}  // namespace

Schedule tree_reduce(const RankInfo& info) { return reduce(info, 2); }
Schedule tree_broadcast(const RankInfo& info) { return backwards(tree_reduce(info)); }
Schedule knomial_reduce(const RankInfo& info) { return reduce(info, 4); }
Schedule knomial_broadcast(const RankInfo& info) { return backwards(knomial_reduce(info)); }

}  // namespace ringlet
