// A message plan: one rank's part of a schedule as groups of sends and receives, each followed by local arithmetic.
//
// A chunk's value lies in the caller's input until this rank writes that chunk; from then on in the output, or in a
// *work* slot where the chunk is none of the output's. What is to be reduced arrives in *incoming* slots, good for one
// round. A round's copies and reductions follow its group, so they may overwrite what the group sent; a receive may
// not, and a schedule that wants it is refused. `in_step`: all ranks' rounds can be numbered so that those that meet
// are equal. Then ranks that take several segments in turns, step by step, all do so in one order and never wait in a
// circle. From step `whole_from` on no rank has anything in a slot, so nothing need be cut into segments there.
// Depends on the schedules alone, not on count, dtype or addresses. Thread safety: immutable once made.
#pragma once

#include <cstdint>
#include <vector>

#include "schedule/registry.h"

namespace ringlet {

enum class Residence : uint8_t { input, output, work, incoming };

struct Location {
  Residence residence;
  int chunk;     ///< whose value it is
  int slot = 0;  ///< of work or incoming
};

inline constexpr int kNoChunk = -1;  ///< of a transfer that is nothing but a meeting

struct GpuTransfer {
  int peer;
  Location location;
};

struct GpuCombine {
  Location to;
  int first_source;
  int sources;  ///< 1: a copy
  bool finish;  ///< all contributions are in: divide for avg
};

struct GpuRound {
  std::vector<GpuTransfer> sends;
  std::vector<GpuTransfer> receives;
  std::vector<GpuCombine> combines;  ///< copies first: they see the values from before the round
  int step = 0;                      ///< the round's common number; where there is none, its own
};

struct GpuPlan {
  int parts = 1;
  int work_slots = 0;
  int incoming_slots = 0;
  int slots = 0;         ///< of both, at the rank that has most: all ranks cut a message into the same segments
  int most_sources = 1;  ///< of a reduction, at any rank
  std::vector<GpuCombine> scale;  ///< before the first round: premul_sum's own input, where the plan is for that
  std::vector<GpuRound> rounds;
  std::vector<GpuCombine> deliver;  ///< after the last round: output chunks that are still the input's
  std::vector<Location> sources;
  bool in_step = true;
  int whole_from = 0;
};

/// The plan of info.rank. `scaled`: the own input is multiplied before anything is made of it, so that this rank and
/// its peers add the same value. InvalidUsage where the schedule receives into what the same round sends or copies.
GpuPlan make_gpu_plan(const Algorithm& algorithm, const RankInfo& info, bool scaled);

}  // namespace ringlet
