// Algorithms that a process adds at run time. What their ranks do is data, handed over for each place before use.
//
// Contract: an added algorithm stays, so plans, rules and logs may point to it. A later one of the same name takes its
// place in look-ups by name. Who hands schedules over has proved them, and knows that all ranks have the same ones.
// Ownership: the process. Thread safety: any; look-ups take no lock.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "schedule/registry.h"

namespace ringlet {

/// Bounds of a schedule that was handed over: a plan numbers rounds in 16 bits, and a chunk has an element of 16 bytes
/// in the smallest segment (engine/pull/pull_executor.cc).
inline constexpr int kMostAuthoredRounds = 1 << 15;
inline constexpr int kMostAuthoredParts = 1 << 14;

/// Adds one. Throws InvalidUsage where a built-in algorithm of the collective has the name.
const Algorithm& add_algorithm(Collective collective, const std::string& name, const std::string& summary);

/// The newest of that name; null where there is none.
const Algorithm* find_authored(Collective collective, std::string_view name) noexcept;
/// By index_of(); null where there is none.
const Algorithm* authored_at(int index) noexcept;
/// The newest that announces itself by this number (Authored::id); null where this process knows none.
const Algorithm* authored_by_id(uint32_t id) noexcept;
/// The newest of each name, the oldest name first.
std::vector<const Algorithm*> authored_algorithms();

/// Where schedules are for.
struct AuthoredPlace {
  int world;
  int root;
  std::vector<int> hosts;  ///< by rank, numbered by first appearance; empty: all ranks share a host
};

/// Hands over all ranks' schedules; again the same ones, nothing changes. Throws InvalidUsage where they are larger than
/// the engines can take.
void hand_over(const Algorithm& algorithm, const AuthoredPlace& place, std::vector<Schedule> ranks);

/// A built-in algorithm or one of this process's own; null where there is neither.
const Algorithm* find_any_algorithm(Collective collective, std::string_view name) noexcept;
/// The algorithm that was added last, or null. While it stays the same, every name stands for the same algorithm.
const Algorithm* newest_authored() noexcept;
/// "a, b, c": both kinds, for messages.
std::string all_algorithm_names(Collective collective);

}  // namespace ringlet
