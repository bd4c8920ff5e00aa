// A rank and the other ranks on its host, for the hierarchical algorithms. Plain data.
#pragma once

#include <algorithm>
#include <vector>

#include "schedule/collective.h"
#include "schedule/topology.h"

namespace ringlet {

/// The ranks on a host in ascending order, but `leader` first, if it is among them.
inline std::vector<int> ranks_on(const Topology& topology, int host, int leader) {
  const auto there = topology.ranks_on(host);
  std::vector<int> ranks(there.begin(), there.end());
  const auto found = std::find(ranks.begin(), ranks.end(), leader);
  if (found != ranks.end()) std::rotate(ranks.begin(), found, found + 1);
  return ranks;
}

struct Locals {
  static constexpr int kNobody = -1;

  explicit Locals(const RankInfo& info, int leader = kNobody)
      : topology(topology_of(info)),
        leader(leader),
        host(topology.host(info.rank)),
        ranks(ranks_on(topology, host, leader)),
        index(static_cast<int>(std::find(ranks.begin(), ranks.end(), info.rank) - ranks.begin())) {}

  int size() const { return static_cast<int>(ranks.size()); }
  bool alone() const { return size() == 1; }

  /// Indices into `ranks` of the other ranks among the first `most`. They begin with the next rank, so that the ranks
  /// of a host do not all start with the same one.
  std::vector<int> others(int most) const {
    std::vector<int> found;
    for (int i = (index + 1) % size(); i != index; i = (i + 1) % size()) {
      if (i < most) found.push_back(i);
    }
    return found;
  }

  /// The other ranks on this host, from the next one on.
  std::vector<int> peers() const {
    std::vector<int> found;
    for (const int i : others(size())) found.push_back(ranks[i]);
    return found;
  }

  Topology topology;
  int leader;
  int host;
  std::vector<int> ranks;  ///< on this host
  int index;               ///< of this rank among them
};

}  // namespace ringlet
