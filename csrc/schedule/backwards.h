// A reduction run backwards: the data that were combined on the way to a rank spread from that rank. A reduce becomes a
// broadcast, a reduce-scatter an all-gather. Pure.
#pragma once

#include <algorithm>

#include "schedule/step.h"

namespace ringlet {

/// Rounds in reverse order, sends as receives and receives as sends; steps stay in their order, so that messages of one
/// round still pair up. No copies.
inline Schedule backwards(Schedule schedule) {
  std::reverse(schedule.rounds.begin(), schedule.rounds.end());
  for (Round& round : schedule.rounds) {
    for (Step& step : round.steps) step.verb = step.verb == Verb::send ? Verb::recv : Verb::send;
  }
  return schedule;
}

/// An all-reduce: a reduction, and the way back.
inline Schedule there_and_back(Schedule schedule) {
  schedule.then(backwards(schedule));
  return schedule;
}

}  // namespace ringlet
