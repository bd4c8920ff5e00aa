// Swing: a butterfly bent round a ring. In step s an even rank exchanges with rank + rho(s) and an odd one with
// rank - rho(s), where rho is 1, -1, 3, -5, 11, ...: partners are a third nearer than a butterfly's, on either side in
// turn.
//
//   world 8, step 0   0-1 2-3 4-5 6-7     step 1   7-0 1-2 3-4 5-6     step 2   0-3 1-6 2-5 4-7
//
// Reduce-scatter: a rank passes its sum of a block on once, in the last step whose partner still has a way to the
// block's rank in the steps after it. So the ways to one block form a tree, for every even world. (Passing on whatever
// the partner can use adds contributions twice if the world is no power of two.) The all-gather is the same
// backwards. In an odd world the last rank does not swing: it exchanges one block with each of the others, spread over
// the steps. Rounds: ceil(log2 e) each, where e is the even one of world and world - 1. Bytes sent per rank:
// S (world-1)/world each. Sums: depth <= ceil(log2 world).
// Source: De Sensi, Bonato, Saam and Hoefler, "Swing: Short-cutting Rings for Higher Bandwidth Allreduce", NSDI 2024,
// section 3 (arXiv 2401.09356); the rule that gives each block one way is ours.
#include <algorithm>
#include <bit>

#include "schedule/algorithms.h"
#include "schedule/chunk_list.h"
#include "schedule/compose.h"

namespace ringlet {
namespace {

struct Swing {
  explicit Swing(int world)
      : size(world - world % 2), steps(size > 0 ? std::bit_width(size - 1u) : 0), distance(steps), passed(steps) {
    std::vector<bool> reached(size);  // by offset from an even rank: in the steps after the one looked at
    if (size > 0) reached[0] = true;
    for (int s = 0, rho = 1; s < steps; ++s, rho = 1 - 2 * rho) distance[s] = rho;
    for (int s = steps - 1; s >= 0; --s) {
      const std::vector<bool> later = reached;
      for (int offset = 0; offset < size; ++offset) {
        if (later[offset] || !later[wrapped(distance[s] - offset)]) continue;
        passed[s].push_back(offset);
        reached[offset] = true;
      }
    }
  }

  int wrapped(int number) const { return (number % size + size) % size; }
  int partner(int rank, int offset) const { return wrapped(rank % 2 == 0 ? rank + offset : rank - offset); }

  /// The step in which a rank exchanges with the odd one, which gives as much in each step as the others do.
  int turn(int rank) const {
    int s = 0;
    while (s < steps - 1 && rank >= static_cast<int>(passed[s].size())) rank -= static_cast<int>(passed[s++].size());
    return s;
  }

  /// The blocks that a rank passes on in a step.
  std::vector<int> blocks(int rank, int s) const {
    std::vector<int> found;
    for (const int offset : passed[s]) found.push_back(partner(rank, offset));
    std::sort(found.begin(), found.end());
    return found;
  }

  int size;  // ranks that swing
  int steps;
  std::vector<int> distance;             // rho, by step
  std::vector<std::vector<int>> passed;  // offsets of an even rank's blocks, by step
};

}  // namespace

Schedule swing_reduce_scatter(const RankInfo& info) {
  const Swing swing(info.world);
  Schedule schedule(info.world);
  for (int s = 0; s < swing.steps; ++s) {
    Round& round = schedule.round();
    const auto exchange = [&](int peer, const std::vector<int>& out, const std::vector<int>& in) {
      add_each(round, &Round::send, peer, out);
      add_each(round, &Round::reduce, peer, in);
    };
    if (info.rank < swing.size) {
      const int peer = swing.partner(info.rank, swing.distance[s]), odd = swing.size;
      exchange(peer, swing.blocks(info.rank, s), swing.blocks(peer, s));
      if (odd < info.world && swing.turn(info.rank) == s) exchange(odd, {odd}, {info.rank});
    } else {
      for (int peer = 0; peer < swing.size; ++peer) {
        if (swing.turn(peer) == s) exchange(peer, {peer}, {info.rank});
      }
    }
  }
  return schedule;
}

Schedule swing_all_gather(const RankInfo& info) { return backwards(swing_reduce_scatter(info)); }

Schedule swing_all_reduce(const RankInfo& info) { return there_and_back(swing_reduce_scatter(info)); }

}  // namespace ringlet
