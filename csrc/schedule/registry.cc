#include "schedule/registry.h"

#include "schedule/algorithms.h"
#include "schedule/relabel.h"
#include "schedule/topology.h"

namespace ringlet {
namespace {

using enum Collective;
using enum Order;

constexpr Algorithm kAlgorithms[] = {
    {"ring", all_reduce, ring_all_reduce, "fewest bytes, 2(p-1) rounds between neighbours", along},
    {"butterfly", all_reduce, butterfly_all_reduce, "fewest rounds with one partner at a time; one tree for all",
     along},
    {"halving_doubling", all_reduce, halving_doubling_near, "the butterfly with few bytes, near partners first", along},
    {"halving_doubling_far", all_reduce, halving_doubling_far, "the butterfly with few bytes, far partners first",
     across},
    {"circulant", all_reduce, circulant_all_reduce, "fewest bytes in 2 ceil(log2 p) rounds, for every world", across},
    {"swing", all_reduce, swing_all_reduce, "fewest bytes, partners a third nearer than a butterfly's", along},
    {"recursive_multiplying", all_reduce, recursive_multiplying_all_reduce,
     "the butterfly with up to three partners at a time; one tree for all"},
    {"double_binary_tree", all_reduce, double_binary_tree_all_reduce,
     "up two trees and down, a half of the message each", along},
    {"torus", all_reduce, torus_all_reduce, "rings along rows and columns of ranks; fewest bytes", along},
    {"one_shot", all_reduce, one_shot_all_reduce, "everyone to everyone, whole; one round, one rounding"},
    {"two_shot", all_reduce, two_shot_all_reduce, "everyone to everyone, a chunk each; two rounds, one rounding"},
    {"star", all_reduce, star_all_reduce, "a parameter server at rank 0; the yardstick"},
    {"hierarchical", all_reduce, hierarchical_all_reduce,
     "inside hosts, across in shards, inside; fewest bytes between hosts"},
    {"ring", reduce_scatter, ring_reduce_scatter, "fewest bytes, p-1 rounds between neighbours", along},
    {"circulant", reduce_scatter, circulant_reduce_scatter, "fewest bytes in ceil(log2 p) rounds, for every world",
     across},
    {"swing", reduce_scatter, swing_reduce_scatter, "fewest bytes, partners a third nearer than a butterfly's", along},
    {"pat", reduce_scatter, pat_reduce_scatter, "a tree for each block, near partners first; ceil(log2 p) rounds",
     along},
    {"two_shot", reduce_scatter, two_shot_reduce_scatter, "everyone to everyone; one round, one rounding"},
    {"hierarchical", reduce_scatter, hierarchical_reduce_scatter,
     "inside hosts, then across; fewest bytes between hosts"},
    {"ring", all_gather, ring_all_gather, "fewest bytes, p-1 rounds between neighbours", along},
    {"circulant", all_gather, circulant_all_gather, "fewest bytes in ceil(log2 p) rounds, for every world", across},
    {"swing", all_gather, swing_all_gather, "fewest bytes, partners a third nearer than a butterfly's", along},
    {"pat", all_gather, pat_all_gather, "a tree for each block, far partners first; ceil(log2 p) rounds", along},
    {"bruck", all_gather, bruck_all_gather, "blocks in a row, twice as many a round; ceil(log2 p) rounds", along},
    {"two_shot", all_gather, two_shot_all_gather, "everyone to everyone; one round"},
    {"hierarchical", all_gather, hierarchical_all_gather, "across hosts, then inside; fewest bytes between hosts"},
    {"tree", broadcast, tree_broadcast, "binomial tree; ceil(log2 p) rounds", along},
    {"double_binary_tree", broadcast, double_binary_tree_broadcast, "down two trees, a half of the message each",
     along},
    {"bine", broadcast, bine_broadcast, "a binomial tree with edges to either side; ceil(log2 p) rounds", along},
    {"knomial", broadcast, knomial_broadcast, "a tree with up to three children a round; ceil(log4 p) rounds", along},
    {"chain", broadcast, chain_broadcast, "from rank to rank; a pipeline where there are many segments", along},
    {"star", broadcast, star_broadcast, "the root to everybody; one round"},
    {"hierarchical", broadcast, hierarchical_broadcast, "shards inside the root's host, across by trees, inside"},
    {"tree", reduce, tree_reduce, "binomial tree; ceil(log2 p) rounds", along},
    {"double_binary_tree", reduce, double_binary_tree_reduce, "up two trees, a half of the message each", along},
    {"bine", reduce, bine_reduce, "a binomial tree with edges to either side; ceil(log2 p) rounds", along},
    {"knomial", reduce, knomial_reduce, "a tree with up to three children a round; ceil(log4 p) rounds", along},
    {"chain", reduce, chain_reduce, "from rank to rank; a pipeline where there are many segments", along},
    {"star", reduce, star_reduce, "everybody to the root; one round, one rounding"},
    {"linear", gather, linear_gather, "everybody to the root; one round"},
    {"linear", scatter, linear_scatter, "the root to everybody; one round"},
    {"pairwise", all_to_all, pairwise_all_to_all, "everyone to everyone; one round"},
    {"dissemination", barrier, dissemination_barrier, "ceil(log2 p) rounds of empty messages"},
    // NCCL's own, which are no schedules; last.
    {"nccl", all_reduce, nullptr, "NCCL's own"},
    {"nccl", reduce_scatter, nullptr, "NCCL's own"},
    {"nccl", all_gather, nullptr, "NCCL's own"},
    {"nccl", broadcast, nullptr, "NCCL's own"},
    {"nccl", reduce, nullptr, "NCCL's own"},
};
constexpr size_t kSchedules = std::size(kAlgorithms) - 5;
static_assert(kAlgorithms[kSchedules].make == nullptr && kAlgorithms[kSchedules - 1].collective == barrier);

const Algorithm* find(std::span<const Algorithm> among, Collective collective, std::string_view name) noexcept {
  for (const Algorithm& algorithm : among) {
    if (algorithm.collective == collective && name == algorithm.name) return &algorithm;
  }
  return nullptr;
}

}  // namespace

Schedule schedule_of(const Algorithm& algorithm, const RankInfo& info) {
  if (algorithm.authored != nullptr) return algorithm.authored->schedule(info);
  if (info.topology == nullptr || algorithm.order == Order::none) return algorithm.make(info);
  const Numbering& positions = algorithm.order == along ? info.topology->along() : info.topology->across();
  if (positions.identity) return algorithm.make(info);
  const RankInfo position{positions.position_of[info.rank], info.world, positions.position_of[info.root]};
  return relabelled(algorithm.make(position), algorithm.collective, positions);
}

std::span<const Algorithm> algorithms() noexcept { return std::span(kAlgorithms).first<kSchedules>(); }

const Algorithm* find_algorithm(Collective collective, std::string_view name) noexcept {
  return find(algorithms(), collective, name);
}

const Algorithm* nccls_own(Collective collective) noexcept {
  return find(std::span(kAlgorithms).subspan<kSchedules>(), collective, "nccl");
}

std::string algorithm_names(Collective collective) {
  std::string names;
  for (const Algorithm& algorithm : algorithms()) {
    if (algorithm.collective == collective) names += (names.empty() ? "" : ", ") + std::string(algorithm.name);
  }
  return names;
}

const Algorithm& algorithm_at(size_t index) noexcept { return kAlgorithms[index]; }
size_t built_in_algorithms() noexcept { return std::size(kAlgorithms); }

int index_of(const Algorithm& algorithm) noexcept {
  return algorithm.authored == nullptr ? static_cast<int>(&algorithm - kAlgorithms) : algorithm.authored->index;
}

}  // namespace ringlet
