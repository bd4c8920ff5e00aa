// The binomial tree. Pure functions of place; see tree.cc.
#pragma once

#include "schedule/collective.h"
#include "schedule/step.h"

namespace ringlet {

Schedule tree_broadcast(const RankInfo& info);
Schedule tree_reduce(const RankInfo& info);

}  // namespace ringlet
