// The message is cut into m shards, m being the ranks of the host that has fewest, and shard j has an owner on every
// host: its j-th rank. Hosts talk through the owners only, all shards at once.
//
//   3 hosts of 2 ranks     host 0   A0  B0      in        every rank gives each owner on its host that owner's shard
//   A owns shard 0         host 1   A1  B1      across    A0 A1 A2 among themselves, and so B0 B1 B2
//   B owns shard 1         host 2   A2  B2      out       every owner gives its shard to all ranks on its host
//
// All-reduce: owners combine what comes in; across goes the circulant all-reduce. Broadcast: the root, which counts as
// the first rank of its host, deals out the shards; across goes the binomial tree.
// With n hosts of k ranks each, p = nk: rounds 2 + 2 ceil(log2 n) and 2 + ceil(log2 n), without in and out if k = 1.
// Bytes sent per rank: all-reduce 2S (p-1)/p; broadcast S (2(k-1) + ceil(log2 n))/k at the root. Over a host's uplink:
// all-reduce 2S (n-1)/n, the least possible; broadcast S ceil(log2 n) at the root's host.
// Sums: one n-ary reduction in rank order, rounded once, then depth <= ceil(log2 n).
// Source: the 2D-torus all-reduce of Mikami et al., arXiv 1811.05233, with circulant.cc and knomial.cc between hosts.
#include "schedule/algorithms.h"
#include "schedule/compose.h"
#include "schedule/locals.h"

namespace ringlet {
namespace {

/// Appends a schedule whose ranks are whole hosts, as the owners of this rank's shard run it.
void across(Schedule& schedule, const Schedule& of_hosts, const Locals& here) {
  const auto owner = [&](int host) { return ranks_on(here.topology, host, here.leader)[here.index]; };
  append_among(schedule, of_hosts, owner, here.index * of_hosts.parts, 1);
}

}  // namespace

Schedule hierarchical_all_reduce(const RankInfo& info) {
  const Locals here(info);
  const int shards = here.topology.fewest(), hosts = here.topology.hosts();
  const bool owns = here.index < shards;
  const auto shard = [hosts](int i) { return Chunks{i * hosts, hosts}; };
  Schedule schedule(shards * hosts);
  if (!here.alone()) {
    Round& in = schedule.round();
    for (const int i : here.others(shards)) in.send(here.ranks[i], shard(i));
    for (const int peer : owns ? here.peers() : std::vector<int>{}) in.reduce(peer, shard(here.index));
  }
  if (owns) across(schedule, circulant_reduce_scatter({here.host, hosts}), here);
  return there_and_back(std::move(schedule));
}

Schedule hierarchical_broadcast(const RankInfo& info) {
  const Locals here(info, /*leader=*/info.root);
  const int shards = here.topology.fewest(), source = here.topology.host(info.root);
  const bool owns = here.index < shards, at_root = info.rank == info.root;
  Schedule schedule(shards);
  if (here.host == source && owns && shards > 1) {
    Round& in = schedule.round();
    if (!at_root) in.recv(info.root, {here.index, 1});
    for (const int i : here.others(at_root ? shards : 0)) in.send(here.ranks[i], {i, 1});
  }
  if (owns) across(schedule, tree_broadcast({here.host, here.topology.hosts(), source}), here);
  if (!here.alone()) {
    Round& out = schedule.round();
    for (const int peer : owns ? here.peers() : std::vector<int>{}) {
      if (peer != info.root) out.send(peer, {here.index, 1});
    }
    for (const int i : here.others(at_root ? 0 : shards)) out.recv(here.ranks[i], {i, 1});
  }
  return schedule;
}

}  // namespace ringlet
