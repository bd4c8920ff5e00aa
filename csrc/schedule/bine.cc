// The Bine tree, for any root: a binomial tree whose edges go to either side in turn, so that they are a third shorter.
// Nodes are counted from the root, to both sides. In step s, far ones first, a node that has the message gives it to the
// node rho(s) away, where rho is 1, -1, 3, -5, 11, ..., on the side opposite to its parent's (the root: as it stands).
//
//   world 8, nodes -2 .. 5     step 2    0 -> 3
//                              step 1    0 -> -1   3 -> 4
//                              step 0    0 -> 1   -1 -> -2   3 -> 2   4 -> 5
//
// Other worlds take a range of the nodes that holds the parent of each: the most even one. A node's descendants lie side
// by side, so it is enough to look at the ancestors of the two ends. Reduce: the same edges backwards.
// Rounds: ceil(log2 world) at the root. Bytes sent: broadcast S ceil(log2 world) at the root, reduce S at every other
// rank. Sums: one tree of depth ceil(log2 world). Source: De Sensi et al., "Bine Trees: Enhancing Collective Operations
// by Optimizing Communication Locality", SC 2025 (arXiv 2508.17311); ranges for worlds that are no power of two are ours.
#include <algorithm>
#include <bit>

#include "schedule/algorithms.h"
#include "schedule/compose.h"

namespace ringlet {
namespace {

constexpr Chunks kWhole{0, 1};

int rho(int s) { return (1 + (s % 2 == 0 ? 2 : -2) * (1 << s)) / 3; }

/// A node of the tree of 2^steps nodes.
struct BineNode {
  BineNode(int number, int steps) : number(number), joined(steps) {
    for (int at = 0; at != number;) {
      const int s = --joined;
      if (reaches(side * (number - at), s)) continue;
      ancestors.push_back(at);
      at += side * rho(s);
      side = -side;
    }
  }

  /// Whether steps s-1 .. 0 lead that far: it has s digits to base -2.
  static bool reaches(int away, int s) {
    const unsigned digits = (1u << s) - 1;
    return -static_cast<int>(0xaaaaaaaau & digits) <= away && away <= static_cast<int>(0x55555555u & digits);
  }

  int child(int s) const { return number + side * rho(s); }

  bool is_within(int first, int world) const {
    return std::all_of(ancestors.begin(), ancestors.end(), [&](int a) { return first <= a && a < first + world; });
  }

  int number;
  int joined;  // the step in which its parent gives to it; below it, it gives to its children
  int side = 1;
  std::vector<int> ancestors;  // the root first
};

struct Tree {
  explicit Tree(const RankInfo& info) : info(info), steps(std::bit_width(info.world - 1u)) {
    const auto holds = [&](int from) {
      const int last = from + info.world - 1;
      return BineNode::reaches(from, steps) && BineNode::reaches(last, steps) &&
             BineNode(from, steps).is_within(from, info.world) && BineNode(last, steps).is_within(from, info.world);
    };
    const int even = -(info.world - 1) / 2;
    for (int i = 0; !holds(first); ++i) first = even + (i % 2 == 0 ? -i / 2 : (i + 1) / 2);
  }

  BineNode node_of(int rank) const {
    const int from_root = (rank - info.root + info.world) % info.world;
    return {from_root < first + info.world ? from_root : from_root - info.world, steps};
  }
  int rank_of(int node) const { return (info.root + node + info.world) % info.world; }
  bool has(int node) const { return first <= node && node < first + info.world; }

  RankInfo info;
  int steps;
  int first = 1;  // node of the range
};

}  // namespace

Schedule bine_reduce(const RankInfo& info) {
  const Tree tree(info);
  const BineNode node = tree.node_of(info.rank);
  Schedule schedule(/*parts=*/1);
  for (int s = 0; s < node.joined; ++s) {
    if (tree.has(node.child(s))) schedule.round().reduce(tree.rank_of(node.child(s)), kWhole);
  }
  if (node.number != 0) schedule.round().send(tree.rank_of(node.ancestors.back()), kWhole);
  return schedule;
}

Schedule bine_broadcast(const RankInfo& info) { return backwards(bine_reduce(info)); }

}  // namespace ringlet
