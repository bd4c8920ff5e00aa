// Inside hosts, across them in parallel, inside again: one flat schedule. The only algorithms that read info.topology
// themselves. Pure functions of place; see hierarchical.cc and, for the blocked ones, hierarchical_blocks.cc.
#pragma once

#include "schedule/collective.h"
#include "schedule/step.h"

namespace ringlet {

Schedule hierarchical_all_reduce(const RankInfo& info);
Schedule hierarchical_broadcast(const RankInfo& info);
Schedule hierarchical_reduce_scatter(const RankInfo& info);
Schedule hierarchical_all_gather(const RankInfo& info);

}  // namespace ringlet
