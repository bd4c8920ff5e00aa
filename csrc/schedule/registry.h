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

/// Stands for `make` where an algorithm is not built in (engine/authored.h): its schedules are data.
class Authored {
 public:
  /// Throws InvalidUsage where there is none for that place.
  virtual Schedule schedule(const RankInfo& info) const = 0;

  const int index;    ///< what index_of() says
  const uint32_t id;  ///< what ranks announce: from kFirstAuthoredId on, below twice that

 protected:
  Authored(int index, uint32_t id) : index(index), id(id) {}
  ~Authored() = default;
};
inline constexpr uint32_t kFirstAuthoredId = 1u << 17;

struct Algorithm {
  const char* name;  ///< "ring"
  Collective collective;
  Schedule (*make)(const RankInfo& info);  ///< pure; the schedule of the position info.rank
  const char* summary;                     ///< one line, for people
  Order order = Order::none;
  const Authored* authored = nullptr;  ///< instead of `make`
};

/// The schedule of info.rank along info.topology. Pure.
Schedule schedule_of(const Algorithm& algorithm, const RankInfo& info);

std::span<const Algorithm> algorithms() noexcept;

/// Null if the collective has no algorithm of that name.
const Algorithm* find_algorithm(Collective collective, std::string_view name) noexcept;

/// The algorithm "nccl": NCCL's own collective, which is no schedule (`make` is null) and takes tensors on GPUs alone. It
/// is none of algorithms(). Null where NCCL has none.
const Algorithm* nccls_own(Collective collective) noexcept;
inline bool is_nccls_own(const Algorithm* algorithm) noexcept {
  return algorithm != nullptr && algorithm->make == nullptr && algorithm->authored == nullptr;
}

/// "a, b, c": the collective's algorithms, for messages.
std::string algorithm_names(Collective collective);

/// Of a built-in algorithm: its place in algorithms(), and beyond them if it is NCCL's own; stable within one build.
/// Beyond built_in_algorithms(): the order in which this process added its own.
int index_of(const Algorithm& algorithm) noexcept;
const Algorithm& algorithm_at(size_t index) noexcept;
size_t built_in_algorithms() noexcept;

}  // namespace ringlet
