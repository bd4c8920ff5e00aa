// The dissemination barrier. A pure function of place; see barrier.cc.
#pragma once

#include "schedule/collective.h"
#include "schedule/step.h"

namespace ringlet {

Schedule dissemination_barrier(const RankInfo& info);

}  // namespace ringlet
