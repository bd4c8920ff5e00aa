// Which algorithm `auto` means: one table, the same choice on every rank by construction (collective, bytes, world).
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

#include "schedule/registry.h"

namespace ringlet {

/// Never null: every collective has a row for every size. `bytes`: of the schedule's whole buffer.
const Algorithm* choose_algorithm(Collective collective, size_t bytes, int world);

/// The algorithm of that name; "auto" gives null. Throws InvalidUsage that lists the names there are.
const Algorithm* named_algorithm(Collective collective, std::string_view name);

}  // namespace ringlet
