#include "engine/plan_inputs.h"

#include <map>
#include <string>
#include <utility>

#include "base/error.h"

namespace ringlet {
namespace {

struct Position {
  int round;
  int step;
};

bool receives(const Step& step) { return step.verb == Verb::recv || step.verb == Verb::reduce; }

using Messages = std::map<std::pair<int, int>, std::vector<Position>>;  // (from, to) -> steps in order
using Matches = decltype(PlanInputs::matches);
using Contributions = decltype(PlanInputs::contributions);

[[noreturn]] void unmatched(int from, int to) {
  throw InvalidUsage("schedule: rank " + std::to_string(from) + "'s sends to rank " + std::to_string(to) +
                     " do not match that rank's receives: run `ringlet prove`");
}

void advance(const Schedule& schedule, int rank, int r, const Matches& matches, Contributions& counts) {
  std::vector<int> now = counts[rank][r];
  const auto& round = schedule.rounds[r];
  for (size_t s = 0; s < round.steps.size(); ++s) {
    const Step& step = round.steps[s];
    const Match& match = matches[rank][r][s];
    for (int i = 0; i < step.count; ++i) {
      if (step.verb == Verb::copy) now[step.peer + i] = counts[rank][r][step.first + i];
      if (!receives(step)) continue;
      const int sent = counts[match.peer][match.peer_round][match.peer_first + i];
      const int chunk = step.first + i;
      if (step.verb == Verb::recv) now[chunk] = sent;
      if (step.verb == Verb::reduce) now[chunk] += sent;
    }
  }
  counts[rank].push_back(std::move(now));
}

Matches match_steps(const std::vector<Schedule>& schedules) {
  const int world = static_cast<int>(schedules.size());
  Messages sends, recvs;
  Matches matches(world);
  for (int rank = 0; rank < world; ++rank) {
    matches[rank].resize(schedules[rank].rounds.size());
    for (int r = 0; r < static_cast<int>(schedules[rank].rounds.size()); ++r) {
      const auto& steps = schedules[rank].rounds[r].steps;
      matches[rank][r].resize(steps.size(), {-1, -1, -1});
      for (int s = 0; s < static_cast<int>(steps.size()); ++s) {
        if (steps[s].verb == Verb::send) sends[{rank, steps[s].peer}].push_back({r, s});
        if (receives(steps[s])) recvs[{steps[s].peer, rank}].push_back({r, s});
      }
    }
  }
  if (sends.size() != recvs.size())
    throw InvalidUsage("schedule: sends and receives do not match: run `ringlet prove`");
  for (const auto& [pair, out] : sends) {
    const auto [from, to] = pair;
    const auto in = recvs.find(pair);
    if (in == recvs.end() || in->second.size() != out.size()) unmatched(from, to);
    for (size_t k = 0; k < out.size(); ++k) {
      const auto [send_round, send_step] = out[k];
      const auto [recv_round, recv_step] = in->second[k];
      const Step& send = schedules[from].rounds[send_round].steps[send_step];
      const Step& recv = schedules[to].rounds[recv_round].steps[recv_step];
      if (send.count != recv.count) unmatched(from, to);
      matches[from][send_round][send_step] = {to, recv_round, recv.first};
      matches[to][recv_round][recv_step] = {from, send_round, send.first};
    }
  }
  return matches;
}

/// Which block's length the place of a chunk has: (from, to) of an all-to-all, whose inputs come first; else the index.
std::pair<int, int> length_of(Collective collective, int world, int rank, int chunk) {
  if (collective != Collective::all_to_all) return {0, chunk};
  return chunk < world ? std::pair(rank, chunk) : std::pair(chunk - world, rank);
}

/// Runs the schedules as an engine would run them.
Contributions count_contributions(const std::vector<Schedule>& schedules, const Matches& matches,
                                  const std::vector<Chunks>& inputs) {
  const int world = static_cast<int>(schedules.size());
  Contributions counts(world);
  for (int rank = 0; rank < world; ++rank) {
    std::vector<int> start(schedules[rank].parts, 0);
    for (int i = 0; i < inputs[rank].count; ++i) start[inputs[rank].first + i] = 1;
    counts[rank].push_back(std::move(start));
  }
  for (bool moved = true, left = true; left;) {
    if (!moved) throw InvalidUsage("schedule: ranks wait for each other in a circle: run `ringlet prove`");
    moved = left = false;
    for (int rank = 0; rank < world; ++rank) {
      const int r = static_cast<int>(counts[rank].size()) - 1;
      if (r == static_cast<int>(schedules[rank].rounds.size())) continue;
      left = true;
      bool can = true;
      const auto& steps = schedules[rank].rounds[r].steps;
      for (size_t s = 0; s < steps.size(); ++s) {
        const Match& match = matches[rank][r][s];
        if (receives(steps[s]) && static_cast<int>(counts[match.peer].size()) <= match.peer_round) can = false;
      }
      if (!can) continue;
      advance(schedules[rank], rank, r, matches, counts);
      moved = true;
    }
  }
  return counts;
}

}  // namespace

bool keeps_lengths(Collective collective, const std::vector<Schedule>& ranks) {
  const int world = static_cast<int>(ranks.size());
  const Matches matches = match_steps(ranks);
  for (int rank = 0; rank < world; ++rank) {
    for (size_t r = 0; r < ranks[rank].rounds.size(); ++r) {
      const auto& steps = ranks[rank].rounds[r].steps;
      for (size_t s = 0; s < steps.size(); ++s) {
        const Step& step = steps[s];
        if (step.verb == Verb::send) continue;
        const bool copies = step.verb == Verb::copy;
        const Match& match = matches[rank][r][s];
        const int from = copies ? rank : match.peer, first = copies ? step.first : match.peer_first;
        const int to = copies ? step.peer : step.first;
        for (int i = 0; i < step.count; ++i) {
          if (length_of(collective, world, from, first + i) != length_of(collective, world, rank, to + i)) return false;
        }
      }
    }
  }
  return true;
}

PlanInputs::PlanInputs(const Algorithm& algorithm, const RankInfo& info) : algorithm(algorithm) {
  RankInfo each = info;
  for (each.rank = 0; each.rank < info.world; ++each.rank) {
    schedules.push_back(schedule_of(algorithm, each));
    inputs.push_back(input_chunks(algorithm.collective, each, schedules.back().parts));
    outputs.push_back(output_chunks(algorithm.collective, each, schedules.back().parts));
  }
  matches = match_steps(schedules);
  if (is_reduction(algorithm.collective)) contributions = count_contributions(schedules, matches, inputs);
}

}  // namespace ringlet
