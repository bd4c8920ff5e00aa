// Which algorithms a sanitizer tries where an engine does the same for all.
#pragma once

#include "check.h"
#include "schedule/registry.h"

/// The first of each collective, whose algorithms follow each other, and every `step`-th of all.
inline bool is_tried(const ringlet::Algorithm& algorithm, int step) {
  const int index = ringlet::index_of(algorithm);
  const bool first = index == 0 || (&algorithm - 1)->collective != algorithm.collective;
  return !kSanitized || first || index % step == 0;
}
