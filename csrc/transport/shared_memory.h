// Ranks that are processes of one host: each maps the others' heaps read-only and watches their processes.
//
// Ownership: the region is part of this process's heap. It stays there until every peer has departed or its process is
// gone: a peer that looks late still sees that this rank left. Thread safety: connect from one thread per group.
#pragma once

#include <memory>
#include <string>

#include "base/deadline.h"
#include "transport/store.h"
#include "transport/transport.h"

namespace ringlet {

/// Connects the ranks through `store`, whose keys under `name` must be unused. Throws Timeout that names the missing
/// ranks, InvalidUsage if ranks are on different hosts, ResourceError.
std::unique_ptr<Transport> connect_shared_memory(Store& store, const std::string& name, int rank, int world,
                                                 const Deadline& deadline, Rings rings = Rings::messages);

}  // namespace ringlet
