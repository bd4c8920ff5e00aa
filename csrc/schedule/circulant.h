// Träff's circulant graph algorithms. Pure functions of place; see circulant.cc.
#pragma once

#include "schedule/collective.h"
#include "schedule/step.h"

namespace ringlet {

Schedule circulant_reduce_scatter(const Place& place);
Schedule circulant_all_gather(const Place& place);
Schedule circulant_all_reduce(const Place& place);

}  // namespace ringlet
