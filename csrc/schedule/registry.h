// Every algorithm by name: the table that engines, prover, drawings and tests read.
//
// An algorithm is written for positions 0 .. world-1. The topology says which rank stands at a position, in the order
// that suits the algorithm. schedule_of() applies it: use it whenever you want a schedule.
// To add an algorithm: a file in schedule/, a line in algorithms.h, a row in registry.cc.
// Thread safety: the table is constant.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "schedule/collective.h"
#include "schedule/step.h"

namespace ringlet {

/// The order of ranks in positions (schedule/topology.h): by number, host after host, or round robin over the hosts.
enum class Order : uint8_t { none, along, across };

struct Algorithm {
  const char* name;  ///< "ring"
  Collective collective;
  Schedule (*make)(const RankInfo& info);  ///< pure; the schedule of the position info.rank
  const char* summary;                     ///< one line, for people
  Order order = Order::none;
};

/// The schedule of info.rank along info.topology. Pure.
Schedule schedule_of(const Algorithm& algorithm, const RankInfo& info);

std::span<const Algorithm> algorithms() noexcept;

/// Null if the collective has no algorithm of that name.
const Algorithm* find_algorithm(Collective collective, std::string_view name) noexcept;

/// "a, b, c": the collective's algorithms, for messages.
std::string algorithm_names(Collective collective);

/// Index into algorithms(), stable within one build. Ranks compare it to check that they make the same call.
int index_of(const Algorithm& algorithm) noexcept;

}  // namespace ringlet
