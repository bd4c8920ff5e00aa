// The bandwidth-optimal butterfly (Rabenseifner), in its two orders. Pure functions of place; see halving_doubling.cc.
#pragma once

#include "schedule/collective.h"
#include "schedule/step.h"

namespace ringlet {

Schedule halving_doubling_near(const RankInfo& info);
Schedule halving_doubling_far(const RankInfo& info);

}  // namespace ringlet
