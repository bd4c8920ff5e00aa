// Ranks that are threads of one process: they share all addresses, so all memory counts as registered.
//
// Ownership: the hub of a group lives as long as one of its transports. Thread safety: join() from every rank's own
// thread.
#pragma once

#include <memory>
#include <string>

#include "base/deadline.h"
#include "transport/transport.h"

namespace ringlet {

/// Waits until `world` threads of this process have joined the group `name`. Throws Timeout that names the missing
/// ranks, InvalidUsage if the rank has joined before or the worlds differ. `share_addresses` false: tensors count as
/// ordinary memory, as between processes.
std::unique_ptr<Transport> join_threads(const std::string& name, int rank, int world, const Deadline& deadline,
                                        bool share_addresses = true);

}  // namespace ringlet
