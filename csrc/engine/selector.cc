#include "engine/selector.h"

#include <algorithm>

#include "base/error.h"
#include "base/process.h"
#include "engine/authored.h"
#include "schedule/topology.h"

namespace ringlet {
namespace {

constexpr std::string_view kBuiltInRules = R"(
# Large messages of GPUs go through NCCL, and NCCL knows its links best. For what it does not have there are the schedules
# below.
all_reduce                                nccl     nccl
reduce_scatter                            nccl     nccl
all_gather                                nccl     nccl
broadcast                                 nccl     nccl
reduce                                    nccl     nccl

# Between hosts a round costs more than everything else about a small message, and the bytes that a host sends more than
# everything else about a large one; where hosts have several ranks, few of them need the network. In a chain every host
# sends a message once, segment behind segment, while a tree's root sends it several times.
all_reduce      up to 4KiB                network  butterfly
all_reduce                                hosts    hierarchical
all_reduce                    world 1-8   network  ring
all_reduce                                network  circulant
reduce_scatter                            hosts    hierarchical
reduce_scatter                            network  circulant
all_gather                                hosts    hierarchical
all_gather                                network  circulant
broadcast                                 hosts    hierarchical
broadcast       above 128KiB  world 1-8   apart    chain
broadcast                                 network  tree
reduce          above 128KiB  world 1-8   apart    chain
reduce                                    network  tree

# On GPUs that read each other's memory a round costs a kernel's way to another GPU and back, and whole messages pay while
# few ranks read them: up to vLLM's sizes (csrc/custom_all_reduce.cuh). A round of NCCL's messages is a kernel of its own, so
# the fewest rounds win there, too. None of this has been measured here.
all_reduce                    world 1-2   peers    one_shot
all_reduce      up to 512KiB  world 3-4   peers    one_shot
all_reduce      up to 256KiB  world 5-8   peers    one_shot
all_reduce      up to 32KiB               peers    one_shot
all_reduce                                peers    two_shot
broadcast                     world 1-8   peers    star
reduce                        world 1-8   peers    star
all_reduce      up to 64KiB   world 1-8   nccl     one_shot
all_reduce                                nccl     two_shot

# On one host every rank reads every other's memory at the same cost, so the fewest rounds win: whole messages while they
# are small (each rank reads world times the message), pieces from then on. Two ranks move the same bytes either way
# through staging buffers, and one_shot waits for its peer once, two_shot twice; from about the size of the last-level
# cache on, one_shot reads the caller's tensor from memory a second time, which costs more.
all_reduce      up to 64MiB   world 1-2   staged   one_shot
all_reduce      up to 32KiB   world 1-4            one_shot
all_reduce      up to 8KiB    world 1-16           one_shot
all_reduce      up to 2KiB                         butterfly
all_reduce                                         two_shot
reduce_scatter                                     two_shot
all_gather                                         two_shot
broadcast                     world 1-4            star
broadcast                                          tree
reduce                        world 1-4            star
reduce                                             tree

gather                                             linear
scatter                                            linear
all_to_all                                         pairwise
barrier                                            dissemination
)";

/// Whether the condition holds for some call of a group; peers and NCCL may carry calls of any group.
bool may_hold(Medium medium, const Topology* topology) {
  switch (medium) {
    case Medium::memory:
    case Medium::registered:
    case Medium::staged: return topology == nullptr;
    case Medium::network: return topology != nullptr;
    case Medium::hosts: return topology != nullptr && topology->hosts() < topology->world();
    case Medium::apart: return topology != nullptr && topology->hosts() == topology->world();
    default: return true;
  }
}

}  // namespace

Selector::Selector(std::string_view table, const std::string& origin, std::string_view processor)
    : origin_(table.empty() ? "" : origin) {
  struct BuiltIn {
    const std::vector<Rule> rules = parse_table(kBuiltInRules, "the built-in rules", "").rules;
  };
  static constinit OfProcess<BuiltIn> built_in;
  const Table given = parse_table(table, origin, processor);
  tuning_ = given.tuning;
  for (const Rule& rule : given.rules) {
    if (rule.algorithm == nullptr) {
      ways_.push_back(rule);
      continue;
    }
    rules_[static_cast<size_t>(rule.collective)].push_back(rule);
    given_[static_cast<size_t>(rule.collective)] = true;
    names_authored_ = names_authored_ || rule.algorithm->authored != nullptr;
  }
  for (const Rule& rule : built_in.get().rules) rules_[static_cast<size_t>(rule.collective)].push_back(rule);
}

const Rule& Selector::rule_for(const Situation& situation) const {
  for (const Rule& rule : rules_[static_cast<size_t>(situation.collective)]) {
    if (rule.fits(situation)) return rule;
  }
  throw ResourceError(std::string("no rule of the selector fits ") + name(situation.collective));
}

std::optional<Way> Selector::way_for(Collective collective, size_t bytes, int world) const {
  const auto fits = [&](const Rule& rule) { return rule.in_range(collective, bytes, world); };
  const auto found = std::find_if(ways_.begin(), ways_.end(), fits);
  return found == ways_.end() ? std::nullopt : std::optional(found->way);
}

std::vector<const Algorithm*> Selector::authored(Collective collective, int world, const Topology* topology) const {
  std::vector<const Algorithm*> found;
  for (const Rule& rule : rules_[static_cast<size_t>(collective)]) {
    if (world < rule.least_world || world > rule.most_world || !may_hold(rule.medium, topology)) continue;
    const bool known = std::find(found.begin(), found.end(), rule.algorithm) != found.end();
    if (rule.algorithm->authored != nullptr && !known) found.push_back(rule.algorithm);
  }
  return found;
}

std::string_view built_in_rules() noexcept { return kBuiltInRules.substr(1); }

const Algorithm* named_algorithm(Collective collective, std::string_view wanted) {
  if (wanted == "auto") return nullptr;
  if (const Algorithm* own = wanted == "nccl" ? nccls_own(collective) : nullptr) return own;
  if (const Algorithm* found = find_any_algorithm(collective, wanted)) return found;
  throw InvalidUsage(std::string(name(collective)) + ": algorithm must be one of auto, " +
                     all_algorithm_names(collective) + ", got \"" + std::string(wanted) + '"');
}

}  // namespace ringlet
