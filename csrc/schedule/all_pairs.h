// Everybody with everybody at once. Pure functions of place; see all_pairs.cc.
#pragma once

#include "schedule/collective.h"
#include "schedule/step.h"

namespace ringlet {

Schedule one_shot_all_reduce(const RankInfo& info);
Schedule two_shot_reduce_scatter(const RankInfo& info);
Schedule two_shot_all_gather(const RankInfo& info);
Schedule two_shot_all_reduce(const RankInfo& info);
Schedule pairwise_all_to_all(const RankInfo& info);

}  // namespace ringlet
