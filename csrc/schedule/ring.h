// The ring: reduce-scatter, all-gather, and the all-reduce they make. Pure functions of place; see ring.cc.
#pragma once

#include "schedule/collective.h"
#include "schedule/step.h"

namespace ringlet {

Schedule ring_reduce_scatter(const RankInfo& info);
Schedule ring_all_gather(const RankInfo& info);
Schedule ring_all_reduce(const RankInfo& info);

}  // namespace ringlet
