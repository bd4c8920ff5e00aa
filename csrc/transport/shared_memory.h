// Ranks as processes of one host: each maps the others' heaps read-only and watches their processes.
//
// Ownership: the region is part of this process's heap, and stays one until every peer has departed too, or its process
// is gone: peers that look late still see that this rank left. Thread safety: connect from one thread per group.
#pragma once

#include <memory>
#include <string>

#include "base/deadline.h"
#include "transport/store.h"
#include "transport/transport.h"

namespace ringlet {

/// Meets the other ranks through `store`, whose keys under `name` must be unused. Throws Timeout naming ranks that did
/// not come, InvalidUsage where ranks are on different hosts, SystemError.
std::unique_ptr<Transport> connect_shared_memory(Store& store, const std::string& name, int rank, int world,
                                                 const Deadline& deadline);

/// The same with a wakeup per rank and kind, for Mesh.
std::unique_ptr<Transport> connect_with_wakeups(Store& store, const std::string& name, int rank, int world,
                                                const Deadline& deadline);

}  // namespace ringlet
