#include "schedule/collective.h"

namespace ringlet {
namespace {
constexpr const char* kNames[kCollectives] = {"all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce",
                                              "gather",     "scatter",        "all_to_all", "barrier"};
constexpr Chunks kNone{0, 0};
}  // namespace

const char* name(Collective collective) noexcept { return kNames[static_cast<int>(collective)]; }

std::optional<Collective> parse_collective(std::string_view name) noexcept {
  for (int i = 0; i < kCollectives; ++i) {
    if (name == kNames[i]) return static_cast<Collective>(i);
  }
  return std::nullopt;
}

std::string collective_names() {
  std::string names;
  for (const char* each : kNames) names += (names.empty() ? "" : ", ") + std::string(each);
  return names;
}

bool is_divided(Collective c) noexcept {
  return c == Collective::all_reduce || c == Collective::broadcast || c == Collective::reduce;
}

bool has_root(Collective c) noexcept {
  return c == Collective::broadcast || c == Collective::reduce || c == Collective::gather || c == Collective::scatter;
}

bool is_reduction(Collective c) noexcept {
  return c == Collective::all_reduce || c == Collective::reduce_scatter || c == Collective::reduce;
}

Chunks input_chunks(Collective collective, const RankInfo& info, int parts) noexcept {
  const bool at_root = info.rank == info.root;
  switch (collective) {
    case Collective::all_reduce:
    case Collective::reduce_scatter:
    case Collective::reduce: return {0, parts};
    case Collective::all_gather:
    case Collective::gather: return {info.rank, 1};
    case Collective::broadcast:
    case Collective::scatter: return at_root ? Chunks{0, parts} : kNone;
    case Collective::all_to_all: return {0, info.world};
    case Collective::barrier: return kNone;
  }
  return kNone;
}

Chunks output_chunks(Collective collective, const RankInfo& info, int parts) noexcept {
  const bool at_root = info.rank == info.root;
  switch (collective) {
    case Collective::all_reduce:
    case Collective::all_gather:
    case Collective::broadcast: return {0, parts};
    case Collective::reduce_scatter:
    case Collective::scatter: return {info.rank, 1};
    case Collective::reduce:
    case Collective::gather: return at_root ? Chunks{0, parts} : kNone;
    case Collective::all_to_all: return {info.world, info.world};
    case Collective::barrier: return kNone;
  }
  return kNone;
}

}  // namespace ringlet
