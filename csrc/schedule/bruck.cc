// Bruck's algorithms, for every world in ceil(log2 world) exchanges with the ranks 1, 2, 4, ... further on.
//
// All-gather: a rank gives the next blocks it has, its own first, to the rank 2^k before it, which then has twice as
// many in a row; in the last round only what is lacking.
// All-to-all: a block that has j ranks to go takes one hop for each bit of j, together with all blocks that have the
// same bit. Between hops it rests in a place of its j, by turns input chunk rank + j and output chunk rank - j, so that
// it never arrives where the same round sends; the last hop ends in the output. Blocks with an even number of hops, none
// included, begin in the output, where the first round copies them.
//
//   all-to-all, world 8   j    1    2    3        4    5        6        7
//                        hops  1    2    1 then 2 4    1 then 4 2 then 4 1 then 2 then 4
//
// Rounds: all-gather ceil(log2 world), all-to-all one more. Bytes sent per rank: all-gather S (world-1)/world,
// all-to-all S/world times the bits set in 1 .. world-1: S/2 log2 world for powers of two.
// Source: Bruck, Ho, Kipnis, Upfal and Weathersby, "Efficient Algorithms for All-to-All Communications in Multiport
// Message-Passing Systems", IEEE TPDS 8(11), 1997, sections 3 and 4; resting places by turns: Träff, Rougier and Hunold,
// "Implementing a Classic: Zero-copy All-to-all Communication with MPI Datatypes", ICS 2014.
#include <algorithm>
#include <bit>

#include "schedule/algorithms.h"
#include "schedule/chunk_list.h"

namespace ringlet {
namespace {

std::vector<int> in_a_row(int first, int count, int world) {
  std::vector<int> blocks;
  for (int i = 0; i < count; ++i) blocks.push_back((first + i) % world);
  return blocks;
}

/// Where a block that began with j ranks to go rests on a rank that has `hops` more to give it.
int resting_place(int rank, int world, int j, int hops) {
  return hops % 2 == 0 ? world + (rank - j + world) % world : (rank + j) % world;
}

}  // namespace

Schedule bruck_all_gather(const RankInfo& info) {
  const int world = info.world;
  Schedule schedule(world);
  for (int distance = 1; distance < world; distance *= 2) {
    const int to = (info.rank - distance + world) % world, from = (info.rank + distance) % world;
    const int count = std::min(distance, world - distance);
    Round& round = schedule.round();
    add_each(round, &Round::send, to, in_a_row(info.rank, count, world));
    add_each(round, &Round::recv, from, in_a_row(from, count, world));
  }
  return schedule;
}

Schedule bruck_all_to_all(const RankInfo& info) {
  const int world = info.world;
  Schedule schedule(2 * world);
  Round& copies = schedule.round();
  for (int j = 0; j < world; ++j) {
    const int hops = std::popcount(static_cast<unsigned>(j));
    if (hops % 2 == 0) copies.copy({(info.rank + j) % world, 1}, resting_place(info.rank, world, j, hops));
  }
  for (int distance = 1; distance < world; distance *= 2) {
    const int to = (info.rank + distance) % world, from = (info.rank - distance + world) % world;
    Round& round = schedule.round();
    for (int j = distance; j < world; ++j) {
      if ((j & distance) == 0) continue;
      const int left = std::popcount(static_cast<unsigned>(j & -distance));  // hops, this one included
      round.send(to, {resting_place(info.rank, world, j, left), 1});
      round.recv(from, {resting_place(info.rank, world, j, left - 1), 1});
    }
  }
  return schedule;
}

}  // namespace ringlet
