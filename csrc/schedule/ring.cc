// The ring. Reduce-scatter: chunk c leaves rank c+1, walks the ring once, gains one contribution per hop, and
// arrives at rank c complete. All-gather: chunk c leaves rank c and walks the ring once.
//
//   reduce-scatter, round i:   send chunk (rank-1-i) to next,   reduce chunk (rank-2-i) from prev
//   all-gather,     round i:   send chunk (rank-i)   to next,   recv   chunk (rank-1-i) from prev
//
// Rounds: world-1 each. Bytes sent per rank: S (world-1)/world each; together the least possible for an all-reduce.
// Sums: a chain of world-1 additions that starts at a different rank for each chunk.
// Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 69(2), 2009.
#include "schedule/algorithms.h"

namespace ringlet {
namespace {

struct Ring {
  explicit Ring(const RankInfo& info)
      : world(info.world), next((info.rank + 1) % world), prev((info.rank + world - 1) % world) {}

  /// Chunk `index` of the circle; index >= -world.
  Chunks chunk(int index) const { return {(index + world) % world, 1}; }

  int world;
  int next;
  int prev;
};

}  // namespace

Schedule ring_reduce_scatter(const RankInfo& info) {
  const Ring ring(info);
  Schedule schedule(info.world);
  for (int i = 0; i < info.world - 1; ++i) {
    schedule.round().send(ring.next, ring.chunk(info.rank - 1 - i)).reduce(ring.prev, ring.chunk(info.rank - 2 - i));
  }
  return schedule;
}

Schedule ring_all_gather(const RankInfo& info) {
  const Ring ring(info);
  Schedule schedule(info.world);
  for (int i = 0; i < info.world - 1; ++i) {
    schedule.round().send(ring.next, ring.chunk(info.rank - i)).recv(ring.prev, ring.chunk(info.rank - 1 - i));
  }
  return schedule;
}

Schedule ring_all_reduce(const RankInfo& info) {
  Schedule schedule = ring_reduce_scatter(info);
  schedule.then(ring_all_gather(info));
  return schedule;
}

}  // namespace ringlet
