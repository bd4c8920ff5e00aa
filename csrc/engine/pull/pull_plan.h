// A plan (plan/plan.h) for ranks that read each other's memory: a sequence of three kinds of step, with all read and
// write hazards resolved.
//
//   publish   tell the peers that earlier rounds are done, and that they can read the chunks of the next round
//   wait      until a peer has published a phase
//   combine   n sources (own memory or peers') into one or two places of own memory
//
// There is a wait only before a value is used (its sender must have published it) and before memory is reused (its
// readers must be done). So no rank waits longer than in an execution without buffers, and the prover shows that this
// one ends. A plan depends on the schedules and on whether tensors are registered, not on count, dtype or
// addresses: one plan serves every message size, segment by segment. Thread safety: immutable once made.
#pragma once

#include <cstdint>
#include <vector>

#include "plan/plan.h"

namespace ringlet {

struct PlanStep {
  enum class Kind : uint8_t { publish, wait, combine };
  Kind kind;
  Home to = Home::none;
  bool tee = false;        // combine: to the output as well
  bool finish = false;     // combine: holds the contributions of all ranks: divide for avg
  bool read_later = true;  // combine: peers or this rank read the result from `to` again
  int peer = -1;           // wait
  uint32_t phase = 0;      // publish, wait: of this epoch (transport/control.h)
  int chunk = 0;           // combine: first chunk written
  int chunks = 1;          // combine: how many; the chunks of every source are adjacent, too
  int first_source = 0;
  int sources = 0;
};

/// The phase after the last phase: the epoch is complete. Added to the epoch's counter value, it gives the next epoch.
inline constexpr uint32_t kCompleted = 1u << 16;

struct PullPlan {
  int parts = 1;
  int rounds = 0;
  bool in_place = false;
  int staging_buffers =
      0;  // the most of any rank: all ranks cut a message alike, and put its segments in the same places
  std::vector<PlanStep> steps;
  size_t body = 0;  // the steps from here on wait for readers of this rank's tensors: only in the last segment
  std::vector<Source> sources;
  int most_sources = 1;
};

/// The plan of info.rank. `in_place`: every rank's tensors are registered, and ends_in_place(). Throws InvalidUsage if
/// ranks would wait in a circle, which only added algorithms can bring about.
PullPlan make_pull_plan(const Algorithm& algorithm, const RankInfo& info, bool in_place);

/// The plan of info.rank if every rank's tensors are registered: in place, unless ranks would wait in a circle, or it
/// copies as much as the staged plan, over all ranks. Then the staged plan is faster: in place each line of a tensor
/// moves to the cache of the peer that reads it, and back to this rank, which writes it.
PullPlan make_faster_plan(const Algorithm& algorithm, const RankInfo& info);

/// Whether no ranks wait in a circle in place.
bool ends_in_place(const Algorithm& algorithm, const RankInfo& info);

}  // namespace ringlet
