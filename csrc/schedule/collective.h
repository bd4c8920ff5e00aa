// The contract of a collective: which chunks of the schedule's buffer are a rank's input, and which are its output.
//
// A buffer has one of two shapes. *Divided* (all_reduce, broadcast, reduce): the caller's count elements are cut into
// `parts` nearly equal chunks, so a chunk keeps its index wherever it goes. *Blocked* (the others): every chunk has the
// caller's count elements, so a chunk may take the place of any other. Pure functions.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "schedule/step.h"

namespace ringlet {

//   collective       parts   input at rank r      output at rank r
//   all_reduce       any     all                  all
//   reduce_scatter   world   all                  chunk r
//   all_gather       world   chunk r              all
//   broadcast        any     all, root only       all
//   reduce           any     all                  all, root only
//   gather           world   chunk r              all, root only
//   scatter          world   all, root only       chunk r
//   all_to_all       2 world chunks [0, world): block j is for rank j;   [world, 2 world): block i is from rank i
//   barrier          1       none                 none
enum class Collective : uint8_t {
  all_reduce,
  reduce_scatter,
  all_gather,
  broadcast,
  reduce,
  gather,
  scatter,
  all_to_all,
  barrier,
};
inline constexpr int kCollectives = 9;

const char* name(Collective collective) noexcept;
std::optional<Collective> parse_collective(std::string_view name) noexcept;
/// "a, b, c": all of them, for messages.
std::string collective_names();

bool is_divided(Collective collective) noexcept;
bool has_root(Collective collective) noexcept;
bool is_reduction(Collective collective) noexcept;

class Topology;

struct RankInfo {
  int rank;
  int world;
  int root = 0;
  const Topology* topology = nullptr;  ///< not owned; null: all ranks share a host
};

Chunks input_chunks(Collective collective, const RankInfo& info, int parts) noexcept;
Chunks output_chunks(Collective collective, const RankInfo& info, int parts) noexcept;

}  // namespace ringlet
