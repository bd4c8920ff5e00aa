// Algorithms that a process adds at run time. Their schedules are data, handed over for each place before use.
//
// Contract: an added algorithm stays, so plans, rules and logs may point to it. Look-ups by name find the newest one.
// The caller of hand_over() has proved the schedules, and knows that all ranks have the same ones.
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

/// Adds an algorithm. Throws InvalidUsage if a built-in algorithm of the collective has the name.
const Algorithm& add_algorithm(Collective collective, const std::string& name, const std::string& summary);

/// The newest algorithm of that name; null if there is none.
const Algorithm* find_authored(Collective collective, std::string_view name) noexcept;
/// The algorithm with that index_of(); null if there is none.
const Algorithm* authored_at(int index) noexcept;
/// The collective's newest algorithm with this number (Authored::id) in call signatures; null if this process has none.
const Algorithm* authored_by_id(Collective collective, uint32_t id) noexcept;
/// The newest algorithm of each name, the oldest name first.
std::vector<const Algorithm*> authored_algorithms();

/// The groups and calls that a set of schedules is for.
struct AuthoredPlace {
  int world;
  int root;
  std::vector<int> hosts;  ///< by rank, numbered by first appearance; empty: all ranks share a host
};

/// Hands over all ranks' schedules. To hand over the same ones again changes nothing. Throws InvalidUsage if they are
/// larger than the engines can take.
void hand_over(const Algorithm& algorithm, const AuthoredPlace& place, std::vector<Schedule> ranks);

/// A built-in algorithm, or one that this process added; null if there is neither.
const Algorithm* find_any_algorithm(Collective collective, std::string_view name) noexcept;
/// The algorithm that was added last, or null. While it stays the same, every name stands for the same algorithm.
const Algorithm* newest_authored() noexcept;
/// For messages: the names of built-in and added algorithms, "a, b, c".
std::string all_algorithm_names(Collective collective);

}  // namespace ringlet
