#include "gpu/gpu_plan.h"

#include <algorithm>
#include <limits>
#include <string>

#include "base/error.h"

namespace ringlet {
namespace {

/// Numbers of rounds such that those of a rank ascend and those that meet are equal.
class CommonSteps {
 public:
  explicit CommonSteps(const Schedules& schedules) {
    for (int q = 0; q < schedules.world(); ++q) {
      first_.push_back(static_cast<int>(group_.size()));
      for (int r = 0; r < schedules[q].rounds(); ++r) group_.push_back(static_cast<int>(group_.size()));
    }
    groups_ = static_cast<int>(group_.size());
    for (int q = 0; q < schedules.world(); ++q) {
      const RankSchedule& mine = schedules[q];
      for (uint32_t s = 0; s < mine.steps.size(); ++s) {
        const int peer = mine.steps[s].peer;
        if (receives(mine.steps[s]))
          unite(first_[q] + mine.round_of(s), first_[peer] + schedules[peer].round_of(mine.match[s]));
      }
    }
    step_.resize(group_.size(), 0);
    for (bool moved = true; moved && exist_;) {
      moved = false;
      for (int q = 0; q < schedules.world(); ++q) {
        for (int round = first_[q] + 1; round < first_[q] + schedules[q].rounds(); ++round) {
          const int least = step_[root_of(round - 1)] + 1;
          int& step = step_[root_of(round)];
          moved = moved || step < least;
          step = std::max(step, least);
          exist_ = exist_ && step < groups_;  // else two groups push each other up for ever
        }
      }
    }
  }

  bool exist() const { return exist_; }
  int of(int rank, int round) const { return exist_ ? step_[root_of(first_[rank] + round)] : round; }

 private:
  /// Which of the rounds that meet stands for all.
  int root_of(int round) const {
    while (group_[round] != round) round = group_[round] = group_[group_[round]];
    return round;
  }
  void unite(int a, int b) {
    groups_ -= root_of(a) != root_of(b);
    group_[root_of(a)] = root_of(b);
  }

  std::vector<int> first_;          // by rank: the number of its first round among all ranks' rounds, as the next
  mutable std::vector<int> group_;  // another round that this one meets, or itself
  int groups_ = 0;
  std::vector<int> step_;  // of a group
  bool exist_ = true;
};

/// Gives the plan's chunks slots.
void add_slots(GpuPlan& plan) {
  plan.work.resize(static_cast<size_t>(plan.parts), -1);
  plan.incoming.resize(static_cast<size_t>(plan.all_received), -1);
  int kept = 0, meetings = 0;
  const auto keep = [&](int chunk) {
    if (plan.target(chunk) == Home::work && plan.work[chunk] < 0) plan.work[chunk] = kept++;
  };
  for (int c = plan.input.first; plan.scaled && c < plan.input.end(); ++c) keep(c);
  for (const Combine& one : plan.combines) keep(one.chunk);
  plan.meetings = kept;
  for (const Plan::Round& round : plan.rounds) {
    int slot = kept;
    bool meets = false;
    for (const Transfer& sent : Plan::part(plan.sent, round.sent)) meets = meets || sent.count == 0;
    for (const Transfer& received : Plan::part(plan.received, round.received)) {
      meets = meets || received.count == 0;
      for (int i = 0; i < received.count && received.reduces; ++i) plan.incoming[received.place + i] = slot++;
    }
    plan.meetings = std::max(plan.meetings, slot);
    if (meets) meetings = std::max(meetings, round.sent.count + round.received.count);
  }
  plan.slots = plan.meetings + meetings;
}

/// Receives go on while the group sends, and copies follow each other; reductions come last.
void refuse_writes_under_reads(const Schedules& schedules, int rank, const char* algorithm) {
  const RankSchedule& mine = schedules[rank];
  std::vector<int> sent(static_cast<size_t>(mine.parts), -1),
      copied = sent;  // by chunk: in which round
  for (int r = 0; r < mine.rounds(); ++r) {
    for (const Step& step : mine.round(r)) {
      if (receives(step)) continue;
      std::fill_n((step.verb == Verb::send ? sent : copied).begin() + step.first, step.count, r);
    }
    for (const Step& step : mine.round(r)) {
      if (step.verb == Verb::send || step.verb == Verb::reduce) continue;
      for (int c = target(step); c < target(step) + step.count; ++c) {
        if (copied[c] != r && (step.verb == Verb::copy || sent[c] != r)) continue;
        throw InvalidUsage(std::string("schedule ") + algorithm + ": in round " + std::to_string(r) + " rank " +
                           std::to_string(rank) + " overwrites a chunk that it reads; run `ringlet prove`");
      }
    }
  }
}

/// Whether anything of the round lies in a slot.
bool uses_slots(const GpuPlan& plan, const Plan::Round& round) {
  for (const Transfer& sent : Plan::part(plan.sent, round.sent)) {
    for (int i = 0; i < sent.count; ++i) {
      if (plan.found(plan.sent_homes[sent.place + i], sent.first + i) == Home::work) return true;
    }
  }
  for (const Combine& one : Plan::part(plan.combines, round.combines)) {
    if (one.to == Home::work) return true;
    for (const Source& source : plan.sources_of(one)) {
      if (source.message < 0 ? plan.found(source.home, source.chunk) == Home::work : one.sources > 1) return true;
    }
  }
  return false;
}

}  // namespace

GpuPlan make_gpu_plan(const Algorithm& algorithm, const RankInfo& info, bool scaled) {
  const Schedules schedules(algorithm, info);
  const CommonSteps steps(schedules);
  GpuPlan plan;
  int slots = 0, most_sources = 1, whole_from = 0;
  for (int q = 0; q < info.world; ++q) {
    refuse_writes_under_reads(schedules, q, algorithm.name);
    GpuPlan theirs{lower(schedules, q, Reach::messages), scaled, {}, {}, 0, 0, {}};
    add_slots(theirs);
    slots = std::max(slots, theirs.slots);
    most_sources = std::max(most_sources, theirs.most_sources);
    for (int r = 0; r < static_cast<int>(theirs.rounds.size()); ++r) {
      theirs.steps.push_back(steps.of(q, r));
      if (uses_slots(theirs, theirs.rounds[r])) whole_from = std::max(whole_from, theirs.steps[r] + 1);
    }
    if (q == info.rank) plan = std::move(theirs);
  }
  plan.in_step = steps.exist();
  plan.slots = slots;
  plan.most_sources = most_sources;
  // Without common numbers "from that step on" is not the same on all ranks.
  plan.whole_from = plan.in_step || whole_from == 0 ? whole_from : std::numeric_limits<int>::max();
  return plan;
}

}  // namespace ringlet
