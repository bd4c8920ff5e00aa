// Which send matches which receive, for all ranks of a schedule: the k-th from a to b matches the k-th at b from a.
#pragma once

#include <vector>

#include "schedule/step.h"

namespace ringlet {

struct Match {
  int peer;
  int peer_round;
  int peer_first;  // the first of the peer's chunks
};

/// matches[rank][round][step]; for copy steps peer is -1. Throws InvalidUsage where a step has no partner.
using Matches = std::vector<std::vector<std::vector<Match>>>;
Matches match_steps(const std::vector<Schedule>& schedules);

/// contributions[rank][round][chunk]: how many ranks' inputs the value before that round holds (one entry more: after
/// the last round). Runs the schedules as they would run; throws InvalidUsage where they cannot end.
using Contributions = std::vector<std::vector<std::vector<int>>>;
Contributions count_contributions(const std::vector<Schedule>& schedules, const Matches& matches,
                                  const std::vector<Chunks>& inputs);

}  // namespace ringlet
