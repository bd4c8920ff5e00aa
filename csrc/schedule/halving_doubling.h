// The bandwidth-optimal butterfly (Rabenseifner). A pure function of place; see halving_doubling.cc.
#pragma once

#include "schedule/collective.h"
#include "schedule/step.h"

namespace ringlet {

Schedule halving_doubling_all_reduce(const Place& place);

}  // namespace ringlet
