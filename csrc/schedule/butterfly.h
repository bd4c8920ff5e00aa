// The butterfly (recursive doubling). A pure function of place; see butterfly.cc.
#pragma once

#include "schedule/collective.h"
#include "schedule/step.h"

namespace ringlet {

Schedule butterfly_all_reduce(const RankInfo& info);

}  // namespace ringlet
