// Two binary trees, each for one half of the message, in which no rank has children twice: an inner node of one tree is
// a leaf of the other. So all ranks have equal work, and segments follow one another through both trees at once.
//
//   nodes 1 .. 6      4              the second one in an even world:   3          in an odd one every node stands
//                   2   6            the first turned round           5   1        where the one before it does
//                  1 3 5                                             6 4   2
//
// A node's lowest set bit is its height: odd ones are leaves. Reduce and broadcast: the nodes are the ranks after the
// root, which is above both trees. All-reduce: the nodes are all ranks; up to the two top nodes, and back.
// Rounds: 2, all-reduce 4: into a node and out of it. Bytes sent per rank: S, all-reduce 2S. Sums: depth
// ceil(log2 world), all-reduce floor(log2 world), n-ary reductions of a node and its children in rank order; two trees.
// Source: Sanders, Speck and Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan", Parallel
// Computing 35(12), 2009; NCCL's double binary trees (src/graph/trees.cc).
#include <bit>

#include "schedule/algorithms.h"
#include "schedule/compose.h"

namespace ringlet {
namespace {

constexpr int kAbove = 0;  // the parent of a top node

struct Trees {
  /// The place of a node in a tree, and the node at a place.
  int place(int tree, int node) const {
    if (tree == 0) return node;
    return nodes % 2 == 0 ? nodes + 1 - node : (node + nodes - 2) % nodes + 1;
  }
  int node_at(int tree, int place) const {
    if (tree == 0) return place;
    return nodes % 2 == 0 ? nodes + 1 - place : place % nodes + 1;
  }

  int parent(int tree, int node) const {
    const int at = place(tree, node), height = at & -at;
    if (at == static_cast<int>(std::bit_floor(unsigned(nodes)))) return kAbove;
    const int up = (at - height) | (2 * height);
    return node_at(tree, up <= nodes ? up : at - height);
  }

  std::vector<int> children(int tree, int node) const {
    const int at = place(tree, node);
    int below = (at & -at) / 2;
    if (below == 0) return {};
    std::vector<int> found{node_at(tree, at - below)};
    while (below > 0 && at + below > nodes) below /= 2;
    if (below > 0) found.push_back(node_at(tree, at + below));
    return found;
  }

  int nodes;
};

/// Up both trees; node n is the rank n after `above`. Top nodes send to `above` if it takes part.
Schedule upwards(const RankInfo& info, const Trees& trees, int above) {
  const bool above_takes_part = trees.nodes < info.world;
  const auto rank_of = [&](int node) { return (above + node) % info.world; };
  const int node = (info.rank - above + info.world - 1) % info.world + 1;
  Schedule schedule(/*parts=*/2);
  Round first, second;  // leaves give and parents take; parents give
  for (int tree = 0; tree < 2; ++tree) {
    const Chunks half{tree, 1};
    if (node > trees.nodes) {
      first.reduce(rank_of(trees.node_at(tree, std::bit_floor(unsigned(trees.nodes)))), half);
      continue;
    }
    const std::vector<int> children = trees.children(tree, node);
    for (const int child : children) first.reduce(rank_of(child), half);
    const int parent = trees.parent(tree, node);
    if (parent != kAbove || above_takes_part) (children.empty() ? first : second).send(rank_of(parent), half);
  }
  if (!first.steps.empty()) schedule.rounds.push_back(first);
  if (!second.steps.empty()) schedule.rounds.push_back(second);
  return schedule;
}

}  // namespace

Schedule double_binary_tree_reduce(const RankInfo& info) {
  return info.world == 1 ? Schedule(2) : upwards(info, {info.world - 1}, info.root);
}

Schedule double_binary_tree_broadcast(const RankInfo& info) { return backwards(double_binary_tree_reduce(info)); }

Schedule double_binary_tree_all_reduce(const RankInfo& info) {
  return there_and_back(upwards(info, {info.world}, /*above=*/info.world - 1));
}

}  // namespace ringlet
