// A plan: one rank's part of a schedule as a straight line of three kinds of step, all hazards resolved.
//
//   publish   announce that rounds before this are done and that the next round's chunks can be read
//   wait      until a peer has announced as much
//   combine   n sources (own memory or peers') into one or two places of own memory
//
// Waits stand exactly where a value is needed (the sender has it) or where memory is reused (its readers are done),
// so no rank waits for more than the schedule's zero-buffer execution does, which the prover shows to end.
// A plan depends on the schedules and on whether tensors are registered, never on count, dtype or addresses: one plan
// serves every message size, segment by segment. Thread safety: immutable once made.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/pull/placement.h"
#include "schedule/registry.h"

namespace ringlet {

struct Source {
  int rank;
  int chunk;
  Space space;
  bool raw;                    // the rank's unmodified input: premul_sum scales it (own rank's only) ...
  Space staged = Space::none;  // ... or, where it was published, takes it as the peers see it: scaled and rounded
};

struct PlanStep {
  enum class Kind : uint8_t { publish, wait, combine };
  Kind kind;
  Space to = Space::none;
  bool tee = false;        // combine: to the output as well
  bool finish = false;     // combine: all contributions are in: divide for avg
  bool read_later = true;  // combine: peers or this rank read the result from `to` again
  int peer = -1;           // wait
  uint32_t phase = 0;      // publish, wait: of this epoch (transport/control.h)
  int chunk = 0;           // combine: first chunk written
  int chunks = 1;          // combine: that many, in step with every source's chunks
  int first_source = 0;
  int sources = 0;
};

/// The phase that stands for "this epoch is complete"; as a number: the next epoch.
inline constexpr uint32_t kCompleted = 1u << 16;

struct Plan {
  int parts = 1;
  int rounds = 0;
  bool in_place = false;
  int staging_buffers =
      0;  // that any rank uses: all ranks cut the message into the same segments and lay them in the same places
  std::vector<PlanStep> steps;
  size_t body = 0;  // steps from here on are waits for readers of this rank's tensors: at the end of the last segment
  std::vector<Source> sources;
  int most_sources = 1;
};

/// The plan of info.rank. `in_place`: every rank's tensors are registered.
Plan make_plan(const Algorithm& algorithm, const RankInfo& info, bool in_place);

}  // namespace ringlet
