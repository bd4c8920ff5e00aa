// Ranks as threads of one process: every address is every rank's, so all memory counts as registered.
//
// Ownership: the hub of a group lives as long as one of its transports. Thread safety: join() from every rank's own
// thread.
#pragma once

#include <memory>
#include <string>

#include "base/deadline.h"
#include "transport/transport.h"

namespace ringlet {

/// Waits until `world` threads of this process have joined the group `name`. Throws Timeout, naming who is missing,
/// and InvalidUsage for a rank that is there already or another world.
/// `share_addresses` false: tensors count as ordinary memory, as between processes.
std::unique_ptr<Transport> join_threads(const std::string& name, int rank, int world, const Deadline& deadline,
                                        bool share_addresses = true);

}  // namespace ringlet
