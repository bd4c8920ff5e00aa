#include "schedule/registry.h"

#include "schedule/all_pairs.h"
#include "schedule/barrier.h"
#include "schedule/butterfly.h"
#include "schedule/circulant.h"
#include "schedule/halving_doubling.h"
#include "schedule/ring.h"
#include "schedule/star.h"
#include "schedule/tree.h"

namespace ringlet {
namespace {

using enum Collective;

constexpr Algorithm kAlgorithms[] = {
    {"ring", all_reduce, ring_all_reduce, "fewest bytes, 2(p-1) rounds between neighbours"},
    {"butterfly", all_reduce, butterfly_all_reduce, "fewest rounds with one partner at a time; one tree for all"},
    {"halving_doubling", all_reduce, halving_doubling_all_reduce, "the butterfly with few bytes, near partners first"},
    {"circulant", all_reduce, circulant_all_reduce, "fewest bytes in 2 ceil(log2 p) rounds, for every world"},
    {"one_shot", all_reduce, one_shot_all_reduce, "everyone to everyone, whole; one round, one rounding"},
    {"two_shot", all_reduce, two_shot_all_reduce, "everyone to everyone, a chunk each; two rounds, one rounding"},
    {"star", all_reduce, star_all_reduce, "a parameter server at rank 0; the yardstick"},
    {"ring", reduce_scatter, ring_reduce_scatter, "fewest bytes, p-1 rounds between neighbours"},
    {"circulant", reduce_scatter, circulant_reduce_scatter, "fewest bytes in ceil(log2 p) rounds, for every world"},
    {"two_shot", reduce_scatter, two_shot_reduce_scatter, "everyone to everyone; one round, one rounding"},
    {"ring", all_gather, ring_all_gather, "fewest bytes, p-1 rounds between neighbours"},
    {"circulant", all_gather, circulant_all_gather, "fewest bytes in ceil(log2 p) rounds, for every world"},
    {"two_shot", all_gather, two_shot_all_gather, "everyone to everyone; one round"},
    {"tree", broadcast, tree_broadcast, "binomial tree; ceil(log2 p) rounds"},
    {"star", broadcast, star_broadcast, "the root to everybody; one round"},
    {"tree", reduce, tree_reduce, "binomial tree; ceil(log2 p) rounds"},
    {"star", reduce, star_reduce, "everybody to the root; one round, one rounding"},
    {"linear", gather, linear_gather, "everybody to the root; one round"},
    {"linear", scatter, linear_scatter, "the root to everybody; one round"},
    {"pairwise", all_to_all, pairwise_all_to_all, "everyone to everyone; one round"},
    {"dissemination", barrier, dissemination_barrier, "ceil(log2 p) rounds of empty messages"},
};

}  // namespace

std::span<const Algorithm> algorithms() noexcept { return kAlgorithms; }

const Algorithm* find_algorithm(Collective collective, std::string_view name) noexcept {
  for (const Algorithm& algorithm : kAlgorithms) {
    if (algorithm.collective == collective && name == algorithm.name) return &algorithm;
  }
  return nullptr;
}

int index_of(const Algorithm& algorithm) noexcept { return static_cast<int>(&algorithm - kAlgorithms); }

}  // namespace ringlet
