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

/// How peers reach a rank's tensors: in place; in place, and they stay mapped when their call has failed, as registered
/// memory of processes does (for tests); or not, as ordinary memory of processes.
enum class TensorMemory { shared, kept, ordinary };

/// Waits until `world` threads of this process have joined the group `name`. Throws Timeout that names the missing
/// ranks, InvalidUsage if the rank has joined before or the worlds differ.
std::unique_ptr<Transport> join_threads(const std::string& name, int rank, int world, const Deadline& deadline,
                                        TensorMemory tensors = TensorMemory::shared);

}  // namespace ringlet
