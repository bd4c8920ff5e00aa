// Which algorithm `auto` means: one table, the same choice on every rank by construction, since all of its inputs are
// the same on every rank.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

#include "schedule/registry.h"

namespace ringlet {

struct Situation {
  Collective collective;
  size_t bytes;  ///< of the schedule's whole buffer
  int world;
  bool in_place;  ///< all ranks' tensors are registered, and the message is large enough to read them where they lie
  bool network = false;       ///< some ranks reach each other over a network only
  bool shared_hosts = false;  ///< some of them share a host
};

/// Never null: every collective has a row for every situation.
const Algorithm* choose_algorithm(const Situation& situation);

/// The algorithm of that name; "auto" gives null. Throws InvalidUsage that lists the names there are.
const Algorithm* named_algorithm(Collective collective, std::string_view name);

}  // namespace ringlet
