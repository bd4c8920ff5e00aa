// One rank serves all others directly. Pure functions of place; see star.cc.
#pragma once

#include "schedule/collective.h"
#include "schedule/step.h"

namespace ringlet {

Schedule star_all_reduce(const Place& place);  ///< through rank 0, whatever place.root says
Schedule star_broadcast(const Place& place);
Schedule star_reduce(const Place& place);
Schedule linear_gather(const Place& place);
Schedule linear_scatter(const Place& place);

}  // namespace ringlet
