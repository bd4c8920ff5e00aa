// Chunks that need not lie side by side, as few steps. Pure.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

#include "schedule/step.h"

namespace ringlet {

/// Adds the verb for the chunks of a list: one step for each run of chunks that follow one another in the list. Two
/// ranks that add the same list, one as a send and one as a receive, cut it at the same places.
inline void add_each(Round& round, Round& (Round::*verb)(int, Chunks), int peer, const std::vector<int>& list) {
  for (size_t begin = 0, end = 0; begin < list.size(); begin = end) {
    for (end = begin + 1; end < list.size() && list[end] == list[end - 1] + 1;) ++end;
    (round.*verb)(peer, {list[begin], static_cast<int>(end - begin)});
  }
}

/// Adds the verb for a range of the circle of `world` chunks: one step, or two if the range passes the last chunk.
inline void add_range(Round& round, Round& (Round::*verb)(int, Chunks), int peer, Chunks range, int world) {
  const int before_end = std::min(range.count, world - range.first);
  (round.*verb)(peer, {range.first, before_end});
  if (before_end < range.count) (round.*verb)(peer, {0, range.count - before_end});
}

}  // namespace ringlet
