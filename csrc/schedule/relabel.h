// A schedule made for positions, turned into one for the ranks that stand there. Pure.
#pragma once

#include "schedule/collective.h"
#include "schedule/step.h"
#include "schedule/topology.h"

namespace ringlet {

/// Peers become ranks. Where chunks belong to ranks (reduce_scatter, all_gather, ...), chunks move with them, and a
/// step is cut where its chunks no longer lie side by side. Both sides of a message cut alike because its chunks have
/// the same indices on both; a schedule where they have not may only send single chunks, as all_to_all does.
Schedule relabelled(const Schedule& schedule, Collective collective, const Numbering& numbering);

}  // namespace ringlet
