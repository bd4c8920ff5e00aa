// How a group of processes comes together: finds out which ranks share a host, takes over rank 0's table of rules
// (engine/given_table.h), and makes the engine that fits.
//
// Contract: every rank calls join() with the same store, name, world and carrier; `name` is new
// (ringlet/group_key.py).
// Thread safety: one call per group; groups may be joined from several threads.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "base/deadline.h"
#include "engine/engine.h"
#include "transport/store.h"

namespace ringlet {

/// What carries the bytes. automatic: shared memory inside hosts, TCP between them.
enum class Carrier { automatic, shared_memory, tcp };

/// "auto", "shared_memory" or "tcp". Throws InvalidUsage naming them.
Carrier parse_carrier(std::string_view name);
const char* name(Carrier carrier) noexcept;

struct Member {
  int rank;
  int world;
};

/// Either all ranks have the group when it returns, or, if the store shares failures, all throw the error of the rank
/// that failed. Throws Timeout naming ranks that did not come, InvalidUsage for shared_memory across hosts and, on all
/// ranks, for a table that is not right or ranks of several users; ResourceError.
std::unique_ptr<Engine> join(Store& store, const std::string& name, const Member& member, Carrier carrier,
                             const Deadline& deadline);

}  // namespace ringlet
