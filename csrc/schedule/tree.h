// The binomial tree. Pure functions of place; see tree.cc.
#pragma once

#include "schedule/collective.h"
#include "schedule/step.h"

namespace ringlet {

Schedule tree_broadcast(const Place& place);
Schedule tree_reduce(const Place& place);

}  // namespace ringlet
