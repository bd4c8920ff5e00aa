// Every block crosses each link between two hosts once. On each host one rank, the block's owner, combines it with the
// host's other contributions, or spreads it. On its own host rank r owns its block. If r is the j-th rank there, the
// j-th rank of each other host owns the block, counted modulo the number of ranks on that host.
//
//   ranks  0 1 2 | 3 4 | 5       owners of block 0:  0 | 3 | 5     1:  1 | 4 | 5     2:  2 | 3 | 5
//   on three hosts                               3:  0 | 3 | 5     4:  1 | 4 | 5     5:  0 | 3 | 5
//
// Reduce-scatter: in, owners combine their host's contributions to their blocks; across, they send them to the ranks
// whose blocks they are, which combine them. All-gather: across, every rank gives its block to its owners on the other
// hosts; out, owners give what they have to all ranks on their host.
// With n hosts of k ranks each, p = nk: rounds 2, or 1 if n or k is 1. Bytes sent per rank: reduce-scatter
// S (p-1)/p for any hosts; all-gather S (p-1)/p. Over a host's uplink: S (n-1)/n, the least possible.
// Sums: an n-ary reduction in rank order on each host, and one of the hosts' sums: rounded twice.
// Source: as hierarchical.cc, with all hosts at once between hosts.
#include "schedule/algorithms.h"
#include "schedule/compose.h"
#include "schedule/locals.h"

namespace ringlet {
namespace {

int owner_on(const Topology& topology, int host, int block) {
  return topology.ranks_on(host)[topology.index_on_host(block) % topology.size(host)];
}

/// The blocks that each rank of this host owns, in ranges; by its index on the host.
std::vector<std::vector<Chunks>> owned_on(const Locals& here) {
  std::vector<std::vector<Chunks>> owned(static_cast<size_t>(here.size()));
  for (int block = 0; block < here.topology.world(); ++block) {
    std::vector<Chunks>& ranges = owned[here.topology.index_on_host(block) % here.size()];
    if (ranges.empty() || ranges.back().end() < block) ranges.push_back({block, 0});
    ++ranges.back().count;
  }
  return owned;
}

}  // namespace

Schedule hierarchical_reduce_scatter(const RankInfo& info) {
  const Locals here(info);
  const std::vector<std::vector<Chunks>> owned = owned_on(here);
  Schedule schedule(info.world);
  if (!here.alone()) {
    Round& in = schedule.round();
    for (const int i : here.others(here.size())) {
      for (const Chunks blocks : owned[i]) in.send(here.ranks[i], blocks);
    }
    for (const int i : here.others(here.size())) {
      for (const Chunks blocks : owned[here.index]) in.reduce(here.ranks[i], blocks);
    }
  }
  if (!here.topology.one_host()) {
    const Topology& topology = here.topology;
    Round& across = schedule.round();
    for (int i = 1; i < info.world; ++i) {  // the ranks elsewhere whose blocks this rank owns here, from the next on
      const int peer = (info.rank + i) % info.world;
      if (topology.host(peer) != here.host && owner_on(topology, here.host, peer) == info.rank) {
        across.send(peer, {peer, 1});
      }
    }
    for (int i = 1; i < topology.hosts(); ++i) {  // the owners of this rank's block, from the next host on
      across.reduce(owner_on(topology, (here.host + i) % topology.hosts(), info.rank), {info.rank, 1});
    }
  }
  return schedule;
}

Schedule hierarchical_all_gather(const RankInfo& info) { return backwards(hierarchical_reduce_scatter(info)); }

}  // namespace ringlet
