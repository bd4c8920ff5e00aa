#include "engine/selector.h"

#include <array>
#include <limits>

#include "base/error.h"

namespace ringlet {
namespace {

constexpr size_t kAnyBytes = std::numeric_limits<size_t>::max();
constexpr int kAnyWorld = std::numeric_limits<int>::max();

enum class Where { any, staged, network, hosts };

struct Rule {
  Collective collective;
  size_t up_to_bytes;
  int up_to_world;
  const char* algorithm;
  Where where = Where::any;
};

// First rule that fits. Between hosts a round costs more than everything else about a small message, and the bytes that a
// host sends more than everything else about a large one; where hosts have several ranks, few of them need the network.
//
// On one host every rank reads every other's memory at the same cost, so the fewest rounds win:
// whole messages while they are small (each rank reads world times the message), pieces from then on.
constexpr Rule kRules[] = {
    {Collective::all_reduce, 4 << 10, 4, "one_shot", Where::network},
    {Collective::all_reduce, 16 << 10, kAnyWorld, "butterfly", Where::network},
    {Collective::all_reduce, kAnyBytes, kAnyWorld, "hierarchical", Where::hosts},
    {Collective::all_reduce, kAnyBytes, kAnyWorld, "circulant", Where::network},
    {Collective::reduce_scatter, kAnyBytes, kAnyWorld, "hierarchical", Where::hosts},
    {Collective::reduce_scatter, kAnyBytes, kAnyWorld, "circulant", Where::network},
    {Collective::all_gather, kAnyBytes, kAnyWorld, "hierarchical", Where::hosts},
    {Collective::all_gather, kAnyBytes, kAnyWorld, "circulant", Where::network},
    {Collective::broadcast, kAnyBytes, kAnyWorld, "hierarchical", Where::hosts},
    {Collective::broadcast, kAnyBytes, kAnyWorld, "tree", Where::network},
    {Collective::reduce, kAnyBytes, kAnyWorld, "tree", Where::network},
    // Two ranks move the same bytes either way through stages, and one_shot meets once where two_shot meets twice.
    // From about the size of the last-level cache on, one_shot's second look at the caller's tensor costs more than that.
    {Collective::all_reduce, 64 << 20, 2, "one_shot", Where::staged},
    {Collective::all_reduce, 32 << 10, 4, "one_shot"},
    {Collective::all_reduce, 8 << 10, 16, "one_shot"},
    {Collective::all_reduce, 2 << 10, kAnyWorld, "butterfly"},
    {Collective::all_reduce, kAnyBytes, kAnyWorld, "two_shot"},
    {Collective::reduce_scatter, kAnyBytes, kAnyWorld, "two_shot"},
    {Collective::all_gather, kAnyBytes, kAnyWorld, "two_shot"},
    {Collective::broadcast, kAnyBytes, 4, "star"},
    {Collective::broadcast, kAnyBytes, kAnyWorld, "tree"},
    {Collective::reduce, kAnyBytes, 4, "star"},
    {Collective::reduce, kAnyBytes, kAnyWorld, "tree"},
    {Collective::gather, kAnyBytes, kAnyWorld, "linear"},
    {Collective::scatter, kAnyBytes, kAnyWorld, "linear"},
    {Collective::all_to_all, kAnyBytes, kAnyWorld, "pairwise"},
    {Collective::barrier, kAnyBytes, kAnyWorld, "dissemination"},
};
constexpr size_t kRuleCount = std::size(kRules);

bool holds(Where where, const Situation& situation) {
  switch (where) {
    case Where::any: return true;
    case Where::staged: return !situation.network && !situation.in_place;
    case Where::network: return situation.network;
    case Where::hosts: return situation.network && situation.shared_hosts;
  }
  return false;
}

/// The table's names, looked up once.
const std::array<const Algorithm*, kRuleCount>& resolved() {
  static const auto found = [] {
    std::array<const Algorithm*, kRuleCount> all{};
    for (size_t i = 0; i < kRuleCount; ++i) all[i] = find_algorithm(kRules[i].collective, kRules[i].algorithm);
    return all;
  }();
  return found;
}

}  // namespace

const Algorithm* choose_algorithm(const Situation& situation) {
  for (size_t i = 0; i < kRuleCount; ++i) {
    const Rule& rule = kRules[i];
    if (rule.collective != situation.collective || situation.bytes > rule.up_to_bytes) continue;
    if (situation.world > rule.up_to_world || !holds(rule.where, situation)) continue;
    return resolved()[i];
  }
  throw SystemError(std::string("no rule of the selector fits ") + name(situation.collective));
}

const Algorithm* named_algorithm(Collective collective, std::string_view wanted) {
  if (wanted == "auto") return nullptr;
  if (const Algorithm* found = find_algorithm(collective, wanted)) return found;
  std::string known = "auto";
  for (const Algorithm& algorithm : algorithms()) {
    if (algorithm.collective == collective) known += std::string(", ") + algorithm.name;
  }
  throw InvalidUsage(std::string(name(collective)) + " has no algorithm \"" + std::string(wanted) +
                     "\"; there are: " + known);
}

}  // namespace ringlet
