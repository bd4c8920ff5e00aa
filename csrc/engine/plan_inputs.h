// The input of a planner: the schedule of every rank, and which sends match which receives.
//
// A plan is for one rank, but depends on its peers' schedules. Each engine's planner makes its plan from this.
// Thread safety: immutable once made.
#pragma once

#include <vector>

#include "schedule/registry.h"

namespace ringlet {

/// The other end of a send or a receive. The k-th send from a to b matches the k-th receive at b from a.
struct Match {
  int peer;  // of a copy: -1
  int peer_round;
  int peer_first;  // the first of the peer's chunks
};

struct PlanInputs {
  /// Throws InvalidUsage if a send has no receive, a receive has no send, or ranks wait for each other in a cycle.
  PlanInputs(const Algorithm& algorithm, const RankInfo& info);

  int world() const { return static_cast<int>(schedules.size()); }
  /// For a reduction: whether a chunk holds the inputs of all ranks after that round.
  bool complete(int rank, int round, int chunk) const {
    return contributions[rank][round + 1][chunk] == static_cast<int>(schedules.size());
  }

  const Algorithm& algorithm;
  std::vector<Schedule> schedules;                       ///< by rank, like the members below
  std::vector<Chunks> inputs, outputs;                   ///< the chunks of a rank's input and output
  std::vector<std::vector<std::vector<Match>>> matches;  ///< by round and step
  /// For a reduction, by round and chunk: how many ranks' inputs a chunk holds before the round. The last entry counts
  /// them after the last round.
  std::vector<std::vector<std::vector<int>>> contributions;
};

/// Authored::keeps_lengths() of all ranks' schedules.
bool keeps_lengths(Collective collective, const std::vector<Schedule>& ranks);

}  // namespace ringlet
