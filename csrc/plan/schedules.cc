#include "plan/schedules.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/error.h"

namespace ringlet {
namespace {

[[noreturn]] void unmatched(int from, int to) {
  throw InvalidUsage("schedule: rank " + std::to_string(from) + "'s sends to rank " + std::to_string(to) +
                     " do not match that rank's receives: run `ringlet prove`");
}

/// Which block's length the place of a chunk has: (from, to) of an all-to-all, whose inputs come first; else the index.
std::pair<int, int> length_of(Collective collective, int world, int rank, int chunk) {
  if (collective != Collective::all_to_all) return {0, chunk};
  return chunk < world ? std::pair(rank, chunk) : std::pair(chunk - world, rank);
}

/// Runs the schedules as an engine would run them, on numbers: how many ranks' inputs a chunk holds.
class Counting {
 public:
  explicit Counting(const Schedules& schedules)
      : schedules_(schedules), ranks_(static_cast<size_t>(schedules.world())) {
    for (int q = 0; q < schedules.world(); ++q) {
      ranks_[q].now.resize(schedules[q].parts, 0);
      std::fill_n(ranks_[q].now.begin() + schedules[q].input.first, schedules[q].input.count, 1);
      send(q);
    }
  }

  std::vector<bool> complete_on(int rank) {
    for (bool moved = true, left = true; left;) {
      if (!moved) throw InvalidUsage("schedule: ranks wait for each other in a circle: run `ringlet prove`");
      moved = left = false;
      for (int q = 0; q < schedules_.world(); ++q) {
        for (; can_receive(q); moved = true) {
          receive(q);
          if (q == rank) note(q);
          ++ranks_[q].round;
          send(q);
        }
        left = left || ranks_[q].round < schedules_[q].rounds();
      }
    }
    return std::move(complete_);
  }

 private:
  struct Rank {
    int round = 0;
    uint32_t arrived = 0;   // steps of which nothing is lacking
    std::vector<int> now;   // by chunk
    std::vector<int> sent;  // by place, of the rounds up to this one
  };

  /// Sends the round's chunks as they are before it, and keeps what its copies read.
  void send(int q) {
    if (ranks_[q].round == schedules_[q].rounds()) return;
    for (const Step& step : schedules_[q].round(ranks_[q].round)) {
      if (receives(step)) continue;
      const auto first = ranks_[q].now.begin() + step.first;
      ranks_[q].sent.insert(ranks_[q].sent.end(), first, first + step.count);
    }
  }

  /// Whether all that the round receives has been sent.
  bool can_receive(int q) {
    const RankSchedule& mine = schedules_[q];
    Rank& me = ranks_[q];
    if (me.round == mine.rounds()) return false;
    for (; me.arrived < mine.begin[me.round + 1]; ++me.arrived) {
      const Step& step = mine.steps[me.arrived];
      if (!receives(step)) continue;
      const RankSchedule& theirs = schedules_[step.peer];
      if (mine.match[me.arrived] >= theirs.begin[std::min(ranks_[step.peer].round + 1, theirs.rounds())]) return false;
    }
    return true;
  }

  void receive(int q) {
    const RankSchedule& mine = schedules_[q];
    Rank& me = ranks_[q];
    for (uint32_t s = mine.begin[me.round]; s < mine.begin[me.round + 1]; ++s) {
      const Step& step = mine.steps[s];
      if (step.verb == Verb::send) continue;
      const bool copies = step.verb == Verb::copy;
      const int* const value = copies ? me.sent.data() + mine.place[s]
                                      : ranks_[step.peer].sent.data() + schedules_[step.peer].place[mine.match[s]];
      for (int i = 0; i < step.count; ++i) {
        int& now = me.now[target(step) + i];
        now = value[i] + (step.verb == Verb::reduce ? now : 0);
      }
    }
  }

  void note(int q) {
    for (const Step& step : schedules_[q].round(ranks_[q].round)) {
      for (int i = 0; i < step.count && step.verb == Verb::reduce; ++i)
        complete_.push_back(ranks_[q].now[step.first + i] == schedules_.world());
    }
  }

  const Schedules& schedules_;
  std::vector<Rank> ranks_;
  std::vector<bool> complete_;
};

}  // namespace

int RankSchedule::round_of(uint32_t step) const {
  return static_cast<int>(std::upper_bound(begin.begin(), begin.end(), step) - begin.begin()) - 1;
}

Schedules::Schedules(const Algorithm& algorithm, const RankInfo& info) : rank_(info.rank) {
  RankInfo each = info;
  for (each.rank = 0; each.rank < info.world; ++each.rank) {
    const Schedule schedule = schedule_of(algorithm, each);
    add(schedule, input_chunks(algorithm.collective, each, schedule.parts),
        output_chunks(algorithm.collective, each, schedule.parts));
  }
  match();
  if (is_reduction(algorithm.collective)) complete_ = Counting(*this).complete_on(rank_);
}

Schedules::Schedules(const std::vector<Schedule>& ranks) : rank_(-1) {
  for (const Schedule& schedule : ranks) add(schedule, {}, {});
  match();
}

void Schedules::add(const Schedule& schedule, Chunks input, Chunks output) {
  RankSchedule& flat = ranks_.emplace_back(RankSchedule{schedule.parts, input, output, {}, {0}, {}, {}});
  size_t steps = 0;
  for (const Round& round : schedule.rounds) steps += round.steps.size();
  flat.steps.reserve(steps);
  flat.begin.reserve(schedule.rounds.size() + 1);
  for (const Round& round : schedule.rounds) {
    flat.steps.insert(flat.steps.end(), round.steps.begin(), round.steps.end());
    flat.begin.push_back(static_cast<uint32_t>(flat.steps.size()));
  }
  uint32_t sent = 0, received = 0;
  flat.place.reserve(steps);
  for (const Step& step : flat.steps) {
    uint32_t& place = receives(step) ? received : sent;
    flat.place.push_back(place);
    place += static_cast<uint32_t>(step.count);
  }
}

void Schedules::match() {
  struct Sent {
    int from;
    uint32_t step;
  };
  std::vector<std::vector<Sent>> sent(ranks_.size());  // by receiver, in the order of senders and their steps
  for (int q = 0; q < world(); ++q) {
    ranks_[q].match.resize(ranks_[q].steps.size(), 0);
    for (uint32_t s = 0; s < ranks_[q].steps.size(); ++s) {
      const Step& step = ranks_[q].steps[s];
      if (step.verb != Verb::copy && (step.peer < 0 || step.peer >= world())) unmatched(q, step.peer);
      if (step.verb == Verb::send) sent[step.peer].push_back({q, s});
    }
  }
  std::vector<size_t> next(ranks_.size());  // by sender
  for (int q = 0; q < world(); ++q) {
    const std::vector<Sent>& all = sent[q];
    std::fill(next.begin(), next.end(), all.size());
    for (size_t k = all.size(); k-- > 0;) next[all[k].from] = k;
    size_t received = 0;
    for (uint32_t s = 0; s < ranks_[q].steps.size(); ++s) {
      const Step& step = ranks_[q].steps[s];
      if (!receives(step)) continue;
      const size_t k = next[step.peer]++;
      if (k >= all.size() || all[k].from != step.peer) unmatched(step.peer, q);
      if (ranks_[step.peer].steps[all[k].step].count != step.count) unmatched(step.peer, q);
      ranks_[q].match[s] = all[k].step;
      ranks_[step.peer].match[all[k].step] = s;
      ++received;
    }
    if (received == all.size()) continue;
    const auto left = std::find_if(all.begin(), all.end(), [&](const Sent& each) {
      return next[each.from] < all.size() && all[next[each.from]].from == each.from;
    });
    unmatched(left->from, q);
  }
}

bool keeps_lengths(Collective collective, const std::vector<Schedule>& ranks) {
  const Schedules schedules(ranks);
  const int world = schedules.world();
  for (int rank = 0; rank < world; ++rank) {
    const RankSchedule& mine = schedules[rank];
    for (uint32_t s = 0; s < mine.steps.size(); ++s) {
      const Step& step = mine.steps[s];
      if (step.verb == Verb::send) continue;
      const bool copies = step.verb == Verb::copy;
      const int from = copies ? rank : step.peer;
      const int first = copies ? step.first : schedules[from].steps[mine.match[s]].first;
      for (int i = 0; i < step.count; ++i) {
        if (length_of(collective, world, from, first + i) != length_of(collective, world, rank, target(step) + i))
          return false;
      }
    }
  }
  return true;
}

}  // namespace ringlet
