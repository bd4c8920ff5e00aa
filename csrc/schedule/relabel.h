// Turns a schedule for positions into the schedule of the ranks at these positions. A pure function.
#pragma once

#include "schedule/collective.h"
#include "schedule/step.h"
#include "schedule/topology.h"

namespace ringlet {

/// Peers become ranks. If chunks belong to ranks (reduce_scatter, all_gather, ...), chunks are renumbered, too, and a
/// step is cut between chunks that are no longer neighbours. Both sides of a message cut it alike, because its chunks
/// have the same indices on both. A schedule without that property may only send single chunks, as all_to_all does.
Schedule relabelled(const Schedule& schedule, Collective collective, const Numbering& numbering);

}  // namespace ringlet
