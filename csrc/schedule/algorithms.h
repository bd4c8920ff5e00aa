// The algorithms: each makes the schedule of the position info.rank. All are pure functions.
//
// The file of an algorithm says what it does, in how many rounds, with how many bytes, and where it comes from.
// Callers that want a schedule by name use registry.h.
#pragma once

#include "schedule/collective.h"
#include "schedule/step.h"

namespace ringlet {

// all_pairs.cc: all ranks exchange with all others at once
Schedule one_shot_all_reduce(const RankInfo& info);
Schedule two_shot_reduce_scatter(const RankInfo& info);
Schedule two_shot_all_gather(const RankInfo& info);
Schedule two_shot_all_reduce(const RankInfo& info);
Schedule pairwise_all_to_all(const RankInfo& info);

// barrier.cc
Schedule dissemination_barrier(const RankInfo& info);

// butterfly.cc: recursive doubling
Schedule butterfly_all_reduce(const RankInfo& info);

// circulant.cc: Träff's algorithms on a circulant graph
Schedule circulant_reduce_scatter(const RankInfo& info);
Schedule circulant_all_gather(const RankInfo& info);
Schedule circulant_all_reduce(const RankInfo& info);

// halving_doubling.cc: Rabenseifner's butterfly, in its two orders
Schedule halving_doubling_near(const RankInfo& info);
Schedule halving_doubling_far(const RankInfo& info);

// hierarchical.cc, hierarchical_blocks.cc: inside hosts, across hosts, inside hosts. Only these read info.topology.
Schedule hierarchical_all_reduce(const RankInfo& info);
Schedule hierarchical_broadcast(const RankInfo& info);
Schedule hierarchical_reduce_scatter(const RankInfo& info);
Schedule hierarchical_all_gather(const RankInfo& info);

// ring.cc
Schedule ring_reduce_scatter(const RankInfo& info);
Schedule ring_all_gather(const RankInfo& info);
Schedule ring_all_reduce(const RankInfo& info);

// star.cc: one rank exchanges with all others directly
Schedule star_all_reduce(const RankInfo& info);  ///< through rank 0, whatever info.root says
Schedule star_broadcast(const RankInfo& info);
Schedule star_reduce(const RankInfo& info);
Schedule linear_gather(const RankInfo& info);
Schedule linear_scatter(const RankInfo& info);

// swing.cc: a butterfly bent round a ring
Schedule swing_reduce_scatter(const RankInfo& info);
Schedule swing_all_gather(const RankInfo& info);
Schedule swing_all_reduce(const RankInfo& info);

// recursive_multiplying.cc: the butterfly with more partners a round
Schedule recursive_multiplying_all_reduce(const RankInfo& info);

// double_binary_tree.cc: two trees in which no rank has children twice
Schedule double_binary_tree_all_reduce(const RankInfo& info);
Schedule double_binary_tree_broadcast(const RankInfo& info);
Schedule double_binary_tree_reduce(const RankInfo& info);

// torus.cc: rings along the rows and columns of a grid of ranks
Schedule torus_all_reduce(const RankInfo& info);

// pat.cc: parallel aggregated trees
Schedule pat_reduce_scatter(const RankInfo& info);
Schedule pat_all_gather(const RankInfo& info);

// bruck.cc
Schedule bruck_all_gather(const RankInfo& info);

// bine.cc: a binomial tree with edges to either side
Schedule bine_broadcast(const RankInfo& info);
Schedule bine_reduce(const RankInfo& info);

// knomial.cc: the binomial tree, and a tree with up to three children a round
Schedule tree_broadcast(const RankInfo& info);
Schedule tree_reduce(const RankInfo& info);
Schedule knomial_broadcast(const RankInfo& info);
Schedule knomial_reduce(const RankInfo& info);

// chain.cc: from rank to rank, a pipeline of segments
Schedule chain_broadcast(const RankInfo& info);
Schedule chain_reduce(const RankInfo& info);

}  // namespace ringlet
