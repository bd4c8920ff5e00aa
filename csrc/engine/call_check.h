// What can be wrong with a call on one rank, whatever the others call.
#pragma once

#include "engine/call.h"

namespace ringlet {

/// Throws InvalidUsage for an operation that the dtype lacks, a root that is no rank, a missing tensor, or tensors that
/// overlap so that the call would overwrite data before it reads them.
void check_call(const Call& call, int rank, int world);

}  // namespace ringlet
