// The k-nomial tree with k = 4, for any root: the binomial tree with three children at a time instead of one. Nodes are
// ranks counted from the root; a node's parent is the node without its lowest digit to base four that is not zero.
//
//   0 -- 1  2  3                 reduce: digit by digit from the lowest, the nodes that have it give what they have to
//   |-- 4 -- 5  6  7             their parent, which combines up to three at once
//   |-- 8 -- 9 10 11             broadcast: the same edges backwards, highest digit first
//   `- 12 -- 13 14 15
//
// Rounds: ceil(log4 world) at the root. Bytes sent: broadcast S times the root's children, up to 3 a round; reduce S at
// every other rank. Sums: one tree of depth ceil(log4 world), n-ary reductions in rank order.
// Source: MPICH's and UCC's k-nomial trees; Bruck et al., IEEE TPDS 8(11), 1997, for k ports.
#include "schedule/algorithms.h"
#include "schedule/backwards.h"

namespace ringlet {
namespace {

constexpr int kBase = 4;
constexpr Chunks kWhole{0, 1};

struct KnomialNode {
  explicit KnomialNode(const RankInfo& info) : info(info), number((info.rank - info.root + info.world) % info.world) {
    while (weight < info.world && number / weight % kBase == 0) weight *= kBase;
  }

  bool is_root() const { return number == 0; }
  int parent() const { return rank_of(number - number / weight % kBase * weight); }
  int rank_of(int node) const { return (info.root + node) % info.world; }

  /// The children whose lowest digit has a weight below this node's.
  std::vector<int> children(int at) const {
    std::vector<int> ranks;
    for (int digit = 1; digit < kBase && number + digit * at < info.world; ++digit) {
      ranks.push_back(rank_of(number + digit * at));
    }
    return ranks;
  }

  RankInfo info;
  int number;
  int weight = 1;  // of the lowest digit that is not zero; the root's: past the world
};

}  // namespace

Schedule knomial_reduce(const RankInfo& info) {
  const KnomialNode node(info);
  Schedule schedule(/*parts=*/1);
  for (int at = 1; at < node.weight; at *= kBase) {
    const std::vector<int> children = node.children(at);
    if (children.empty()) break;
    Round& round = schedule.round();
    for (const int child : children) round.reduce(child, kWhole);
  }
  if (!node.is_root()) schedule.round().send(node.parent(), kWhole);
  return schedule;
}

Schedule knomial_broadcast(const RankInfo& info) { return backwards(knomial_reduce(info)); }

}  // namespace ringlet
