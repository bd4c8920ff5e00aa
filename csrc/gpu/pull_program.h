// A plan (engine/pull/pull_plan.h) as the GPU's pull kernel reads it: arrays without pointers, a chunk a step.
//
// Contract: flatten() gives a plan's steps in their order, but for waits, which come before the combines that no
// publication parts them from: a GPU has threads enough to wait for all peers at once and then to move all that they
// have. Steps that can be taken side by side are counted: waits, and combines none of which writes what another reads
// or writes.
// Thread safety: pure.
#pragma once

#include <vector>

#include "cuda/pull.h"
#include "engine/pull/pull_plan.h"

namespace ringlet {

struct FlatPlan {
  std::vector<cuda::PullStep> steps;
  std::vector<cuda::PullSource> sources;
  int body = 0;  ///< steps from here on are PullPlan::body's
};

/// `rank`: whose plan it is.
FlatPlan flatten(const PullPlan& plan, int rank);

}  // namespace ringlet
