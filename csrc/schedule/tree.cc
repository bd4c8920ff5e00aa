// The binomial tree, for any root. Nodes are ranks counted from the root; a node's parent is the node without its
// lowest set bit.
//
//   0 -- 1            reduce: round by round, the nodes with bit 0, then bit 1, ... give what they have to their parent
//   |-- 2 -- 3        broadcast: the same edges backwards, longest first
//   `-- 4 -- 5
//       `-- 6 -- 7
//
// Rounds: ceil(log2 world) at the root. Bytes sent: broadcast S ceil(log2 world) at the root, reduce S at every other
// rank. Sums: one tree of depth ceil(log2 world). Source: Thakur, Rabenseifner and Gropp, "Optimization of collective
// communication operations in MPICH", 2005.
#include "schedule/algorithms.h"

namespace ringlet {
namespace {

constexpr Chunks kWhole{0, 1};

struct Node {
  explicit Node(const RankInfo& info)
      : world(info.world), root(info.root), number((info.rank - info.root + world) % world) {}

  bool has_child(int bit) const { return number + bit < world; }
  bool is_child(int bit) const { return (number & bit) != 0; }
  int child(int bit) const { return (root + number + bit) % world; }
  int parent(int bit) const { return (root + number - bit) % world; }

  int world;
  int root;
  int number;
};

}  // namespace

Schedule tree_reduce(const RankInfo& info) {
  const Node node(info);
  Schedule schedule(/*parts=*/1);
  int bit = 1;
  for (; bit < node.world && !node.is_child(bit); bit *= 2) {
    if (node.has_child(bit)) schedule.round().reduce(node.child(bit), kWhole);
  }
  if (bit < node.world) schedule.round().send(node.parent(bit), kWhole);
  return schedule;
}

Schedule tree_broadcast(const RankInfo& info) {
  const Node node(info);
  Schedule schedule(/*parts=*/1);
  int bit = 1;
  while (bit < node.world && !node.is_child(bit)) bit *= 2;
  if (bit < node.world) schedule.round().recv(node.parent(bit), kWhole);
  for (bit /= 2; bit > 0; bit /= 2) {
    if (node.has_child(bit)) schedule.round().send(node.child(bit), kWhole);
  }
  return schedule;
}

}  // namespace ringlet
