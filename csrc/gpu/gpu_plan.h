// A plan (plan/plan.h) as groups of NCCL sends and receives, each followed by arithmetic on the GPU.
//
// What is to be reduced arrives in *incoming* slots, good for one round; a chunk that is none of the output's lies in a
// *work* slot. A round's copies and reductions follow its group, so they may overwrite what the group sent; a receive
// may not, and a schedule that wants it is refused. `in_step`: all ranks' rounds can be numbered so that those that
// meet are equal. Then ranks that take several segments in turns, step by step, all do so in one order and never wait
// in a circle. From step `whole_from` on no rank has anything in a slot, so nothing need be cut into segments there.
// Thread safety: immutable once made.
#pragma once

#include <vector>

#include "plan/plan.h"

namespace ringlet {

struct GpuPlan : Plan {
  bool scaled = false;        ///< premul_sum: the own input is multiplied before the first round
  std::vector<int> work;      ///< by chunk: its slot, where it has one
  std::vector<int> incoming;  ///< by Transfer::place of what is received: its slot, if it is to be reduced
  int meetings = 0;           ///< the slots from here on are for a round's transfers of nothing, one each
  int slots = 0;              ///< at the rank that has most: all ranks cut a message into the same segments
  std::vector<int> steps;     ///< by round: its common number; where there is none, its own
  bool in_step = true;
  int whole_from = 0;

  Home target(int chunk) const { return output.contains(chunk) ? Home::output : Home::work; }
  /// What only comes in needs no arithmetic: it arrives in its place.
  bool acts(const Combine& one) const { return one.sources > 1 || sources[one.first_source].message < 0; }
  Home found(Home home, int chunk) const { return scaled && home == Home::input ? target(chunk) : home; }
};

/// The plan of info.rank. `scaled`: the own input is multiplied before anything is made of it, so that this rank and
/// its peers add the same value. InvalidUsage where the schedule receives into what the same round sends or copies.
GpuPlan make_gpu_plan(const Algorithm& algorithm, const RankInfo& info, bool scaled);

}  // namespace ringlet
