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

/// Replaces `make` in an algorithm that is not built in (engine/authored.h): its schedules are data.
class Authored {
 public:
  /// Throws InvalidUsage if there is no schedule for these ranks.
  virtual Schedule schedule(const RankInfo& info) const = 0;
  /// Whether every place of a block only ever has blocks of the same length, however long each block is.
  virtual bool keeps_lengths(const RankInfo& info) const = 0;

  const int index;    ///< the result of index_of()
  const uint32_t id;  ///< in call signatures: from kFirstAuthoredId on, below twice that

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

/// The algorithm "nccl": NCCL's own collective, which is no schedule (`make` is null) and takes only tensors on GPUs.
/// It is not in algorithms(). Null if NCCL has no such collective.
const Algorithm* nccls_own(Collective collective) noexcept;
inline bool is_nccls_own(const Algorithm* algorithm) noexcept {
  return algorithm != nullptr && algorithm->make == nullptr && algorithm->authored == nullptr;
}

/// "a, b, c": the collective's algorithms, for messages.
std::string algorithm_names(Collective collective);

/// The index of a built-in algorithm in algorithms(); NCCL's own come after them. Stable within one build.
/// The algorithms that this process added follow built_in_algorithms(), in the order in which it added them.
int index_of(const Algorithm& algorithm) noexcept;
const Algorithm& algorithm_at(size_t index) noexcept;  ///< below built_in_algorithms()
size_t built_in_algorithms() noexcept;

}  // namespace ringlet
