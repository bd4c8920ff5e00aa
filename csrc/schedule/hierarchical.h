// Inside hosts, across them in parallel, inside again: one flat schedule. The only algorithms that read place.topology
// themselves. Pure functions of place; see hierarchical.cc and, for the blocked ones, hierarchical_blocks.cc.
#pragma once

#include "schedule/collective.h"
#include "schedule/step.h"

namespace ringlet {

Schedule hierarchical_all_reduce(const Place& place);
Schedule hierarchical_broadcast(const Place& place);
Schedule hierarchical_reduce_scatter(const Place& place);
Schedule hierarchical_all_gather(const Place& place);

}  // namespace ringlet
