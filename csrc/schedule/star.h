// One rank serves all others directly. Pure functions of place; see star.cc.
#pragma once

#include "schedule/collective.h"
#include "schedule/step.h"

namespace ringlet {

Schedule star_all_reduce(const RankInfo& info);  ///< through rank 0, whatever info.root says
Schedule star_broadcast(const RankInfo& info);
Schedule star_reduce(const RankInfo& info);
Schedule linear_gather(const RankInfo& info);
Schedule linear_scatter(const RankInfo& info);

}  // namespace ringlet
