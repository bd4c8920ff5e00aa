// Schedules made of others. Pure.
#pragma once

#include <algorithm>

#include "schedule/step.h"

namespace ringlet {

/// A reduction run backwards: the data that were combined on the way to a rank spread from that rank. A reduce becomes a
/// broadcast, a reduce-scatter an all-gather. Rounds in reverse order, sends as receives and receives as sends; steps stay
/// in their order, so that messages of one round still pair up. No copies.
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

/// Appends a schedule that some of the ranks run on some of the chunks: rank_of(its rank); `width` chunks from `first` on
/// for each chunk of its own. No copies.
template <typename RankOf>
void append_among(Schedule& schedule, const Schedule& inner, RankOf rank_of, int first, int width) {
  for (const Round& round : inner.rounds) {
    std::vector<Step>& steps = schedule.round().steps;
    for (const Step& step : round.steps) {
      steps.push_back({step.verb, rank_of(step.peer), first + step.first * width, step.count * width});
    }
  }
}

}  // namespace ringlet
