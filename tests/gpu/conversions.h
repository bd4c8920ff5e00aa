// The device's conversions of small floats, against the scalar reference: see conversions.cc.
//
// Contract: reports every case to a section of its own; throws where the device refuses to begin. Thread safety: none.
#pragma once

#include "section.h"

namespace gpu_check {

void conversions(const Options& options);

}  // namespace gpu_check
