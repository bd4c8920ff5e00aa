// Träff's circulant graph algorithms. Pure functions of place; see circulant.cc.
#pragma once

#include "schedule/collective.h"
#include "schedule/step.h"

namespace ringlet {

Schedule circulant_reduce_scatter(const RankInfo& info);
Schedule circulant_all_gather(const RankInfo& info);
Schedule circulant_all_reduce(const RankInfo& info);

}  // namespace ringlet
