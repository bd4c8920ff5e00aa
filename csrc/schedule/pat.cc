// PAT, parallel aggregated trees: every block has a binomial tree of its own, and all trees are one tree turned round
// the ring, so that ranks do the same at the same time and the blocks that two ranks exchange travel together. Far
// partners come first, when a rank has one block to give, and neighbours last, for half of all blocks.
//
//   all-gather, world 6, block 0     distance 4   0 -> 4        block b: the same from rank b on; a way that would
//                                    distance 2   0 -> 2        pass b again is left out
//                                    distance 1   0 -> 1  2 -> 3  4 -> 5
//
// The reduce-scatter is the same backwards. Rounds: ceil(log2 world). Bytes sent per rank: S (world-1)/world. Sums: depth
// ceil(log2 world). Source: Jeaugey, "PAT: a new algorithm for all-gather and reduce-scatter operations at scale", arXiv
// 2506.20252, with all blocks of a distance in one message: what bounds the buffers there, segments do here.
#include "schedule/algorithms.h"
#include "schedule/chunk_list.h"
#include "schedule/compose.h"

namespace ringlet {
namespace {

/// The blocks that the rank has from up to `distance` ranks before it that are a multiple of 2 `distance` away, and
/// that the rank `distance` further on lacks.
std::vector<int> blocks(int rank, int world, int distance) {
  std::vector<int> found;
  for (int back = 0; back + distance < world; back += 2 * distance) found.push_back((rank - back + world) % world);
  return found;
}

}  // namespace

Schedule pat_reduce_scatter(const RankInfo& info) {
  const int world = info.world;
  Schedule schedule(world);
  for (int distance = 1; distance < world; distance *= 2) {
    const int from = (info.rank + distance) % world, to = (info.rank - distance + world) % world;
    Round& round = schedule.round();
    add_each(round, &Round::send, to, blocks(to, world, distance));
    add_each(round, &Round::reduce, from, blocks(info.rank, world, distance));
  }
  return schedule;
}

Schedule pat_all_gather(const RankInfo& info) { return backwards(pat_reduce_scatter(info)); }

}  // namespace ringlet
