// Every algorithm by name: the one table that the engines, the prover, the drawings and the tests read.
//
// To add an algorithm: one file in schedule/, one row in registry.cc.
// Thread safety: the table is constant.
#pragma once

#include <span>
#include <string_view>

#include "schedule/collective.h"
#include "schedule/step.h"

namespace ringlet {

struct Algorithm {
  const char* name;  ///< "ring"
  Collective collective;
  Schedule (*make)(const Place& place);  ///< pure; the schedule of place.rank
  const char* summary;                   ///< one line, for people
};

std::span<const Algorithm> algorithms() noexcept;

/// Null where there is none of that name for that collective.
const Algorithm* find_algorithm(Collective collective, std::string_view name) noexcept;

/// Index into algorithms(), stable within one build: what ranks compare to see that they call the same thing.
int index_of(const Algorithm& algorithm) noexcept;

}  // namespace ringlet
