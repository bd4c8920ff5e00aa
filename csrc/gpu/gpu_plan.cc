#include "gpu/gpu_plan.h"

#include <algorithm>
#include <limits>
#include <optional>
#include <string>

#include "base/error.h"
#include "engine/plan_inputs.h"

namespace ringlet {
namespace {

using Steps = std::vector<std::vector<int>>;  // by rank and round

/// Numbers of rounds such that those of a rank ascend and those that meet are equal; nothing where there are none.
std::optional<Steps> common_steps(const PlanInputs& inputs) {
  const std::vector<Schedule>& schedules = inputs.schedules;
  Steps steps(schedules.size());
  int rounds = 0;
  for (size_t q = 0; q < schedules.size(); ++q) {
    steps[q].resize(schedules[q].rounds.size(), 0);
    rounds += static_cast<int>(schedules[q].rounds.size());
  }
  for (bool moved = true; moved;) {
    moved = false;
    for (size_t q = 0; q < schedules.size(); ++q) {
      for (size_t r = 0; r < steps[q].size(); ++r) {
        int least = r == 0 ? 0 : steps[q][r - 1] + 1;
        for (const Match& match : inputs.matches[q][r]) {
          if (match.peer >= 0) least = std::max(least, steps[match.peer][match.peer_round]);
        }
        if (least > rounds) return std::nullopt;  // two rounds push each other up for ever
        moved = moved || least > steps[q][r];
        steps[q][r] = std::max(steps[q][r], least);
      }
    }
  }
  return steps;
}

class GpuPlanner {
 public:
  GpuPlanner(const PlanInputs& inputs, int rank)
      : inputs_(inputs), rank_(rank), input_(inputs.inputs[rank]), output_(inputs.outputs[rank]) {
    plan_.parts = own().parts;
    work_.resize(plan_.parts, -1);
    for (int c = 0; c < plan_.parts; ++c) now_.push_back({Residence::input, c});
  }

  GpuPlan make(bool scaled) {
    for (int c = input_.first; scaled && c < input_.end(); ++c) {
      plan_.scale.push_back(combine(home(c), {now_[c]}));
      now_[c] = home(c);
    }
    for (int r = 0; r < static_cast<int>(own().rounds.size()); ++r) plan_round(r);
    for (int c = output_.first; c < output_.end(); ++c) {
      if (now_[c].residence != Residence::output) plan_.deliver.push_back(combine({Residence::output, c}, {now_[c]}));
    }
    plan_.slots = plan_.work_slots + plan_.incoming_slots;
    return std::move(plan_);
  }

 private:
  const Schedule& own() const { return inputs_.schedules[rank_]; }

  /// Where this rank keeps what it makes of a chunk.
  Location home(int chunk) {
    if (output_.contains(chunk)) return {Residence::output, chunk};
    if (work_[chunk] < 0) work_[chunk] = plan_.work_slots++;
    return {Residence::work, chunk, work_[chunk]};
  }

  GpuCombine combine(Location to, const std::vector<Location>& sources, bool finish = false) {
    const int first = static_cast<int>(plan_.sources.size()), count = static_cast<int>(sources.size());
    plan_.sources.insert(plan_.sources.end(), sources.begin(), sources.end());
    plan_.most_sources = std::max(plan_.most_sources, count);
    return {to, first, count, finish};
  }

  void plan_round(int r) {
    GpuRound round;
    const std::vector<Location> before = now_;
    int incoming = 0;
    refuse_writes_under_reads(r);
    const auto& steps = own().rounds[r].steps;
    for (const Step& step : steps) {
      if (step.verb == Verb::copy) {
        for (int i = 0; i < step.count; ++i) {
          now_[step.peer + i] = home(step.peer + i);
          round.combines.push_back(combine(now_[step.peer + i], {before[step.first + i]}));
        }
      } else if (step.count == 0) {
        auto& transfers = step.verb == Verb::send ? round.sends : round.receives;
        transfers.push_back({step.peer, {Residence::incoming, kNoChunk, incoming++}});
      }
      for (int c = step.first; c < step.first + step.count; ++c) {
        if (step.verb == Verb::send) round.sends.push_back({step.peer, before[c]});
        if (step.verb == Verb::recv) round.receives.push_back({step.peer, now_[c] = home(c)});
        if (step.verb == Verb::reduce) round.receives.push_back({step.peer, {Residence::incoming, c, incoming++}});
      }
    }
    plan_reductions(r, before, round);
    plan_.incoming_slots = std::max(plan_.incoming_slots, incoming);
    plan_.rounds.push_back(std::move(round));
  }

  /// All that arrives for one chunk is one reduction, in rank order, the own value at the own rank's place.
  void plan_reductions(int r, const std::vector<Location>& before, GpuRound& round) {
    for (int c = 0; c < plan_.parts; ++c) {
      std::vector<std::pair<int, Location>> terms;
      for (const GpuTransfer& transfer : round.receives) {
        if (transfer.location.chunk == c && transfer.location.residence == Residence::incoming)
          terms.push_back({transfer.peer, transfer.location});
      }
      if (terms.empty()) continue;
      terms.push_back({rank_, before[c]});
      std::stable_sort(terms.begin(), terms.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
      std::vector<Location> sources;
      for (const auto& term : terms) sources.push_back(term.second);
      now_[c] = home(c);
      round.combines.push_back(combine(now_[c], sources, inputs_.complete(rank_, r, c)));
    }
  }

  /// Receives go on while the group sends, and copies follow each other; reductions come last.
  void refuse_writes_under_reads(int r) const {
    const auto& steps = own().rounds[r].steps;
    for (const Step& written : steps) {
      if (written.verb != Verb::recv && written.verb != Verb::copy) continue;
      const int first = written.verb == Verb::copy ? written.peer : written.first;
      for (const Step& read : steps) {
        const bool reads = read.verb == Verb::copy || (read.verb == Verb::send && written.verb == Verb::recv);
        if (!reads || read.first >= first + written.count || first >= read.first + read.count) continue;
        throw InvalidUsage(std::string("schedule ") + inputs_.algorithm.name + ": in round " + std::to_string(r) +
                           " rank " + std::to_string(rank_) + " overwrites a chunk that it reads; run `ringlet prove`");
      }
    }
  }

  const PlanInputs& inputs_;
  const int rank_;
  const Chunks &input_, &output_;
  std::vector<Location> now_;  // by chunk: where its value lies
  std::vector<int> work_;      // by chunk: its work slot
  GpuPlan plan_;
};

/// Whether anything of the round lies in a slot.
bool uses_slots(const GpuPlan& plan, const GpuRound& round) {
  const auto in_slot = [](const Location& at) {
    return at.chunk != kNoChunk && (at.residence == Residence::work || at.residence == Residence::incoming);
  };
  const auto moves = [&](const GpuTransfer& transfer) { return in_slot(transfer.location); };
  const auto combines = [&](const GpuCombine& item) {
    const auto first = plan.sources.begin() + item.first_source;
    return in_slot(item.to) || std::any_of(first, first + item.sources, in_slot);
  };
  return std::any_of(round.sends.begin(), round.sends.end(), moves) ||
         std::any_of(round.receives.begin(), round.receives.end(), moves) ||
         std::any_of(round.combines.begin(), round.combines.end(), combines);
}

}  // namespace

GpuPlan make_gpu_plan(const Algorithm& algorithm, const RankInfo& info, bool scaled) {
  const PlanInputs inputs(algorithm, info);
  const std::optional<Steps> steps = common_steps(inputs);
  std::vector<GpuPlan> plans;
  for (int q = 0; q < info.world; ++q) plans.push_back(GpuPlanner(inputs, q).make(scaled));
  GpuPlan plan = plans[info.rank];
  plan.in_step = steps.has_value();
  for (int q = 0; q < info.world; ++q) {
    plan.slots = std::max(plan.slots, plans[q].slots);
    plan.most_sources = std::max(plan.most_sources, plans[q].most_sources);
    for (size_t r = 0; r < plans[q].rounds.size(); ++r) {
      const int step = steps ? (*steps)[q][r] : static_cast<int>(r);
      if (uses_slots(plans[q], plans[q].rounds[r])) plan.whole_from = std::max(plan.whole_from, step + 1);
      if (q == info.rank) plan.rounds[r].step = step;
    }
  }
  // Without common numbers "from that step on" is not the same on all ranks.
  if (!steps && plan.whole_from > 0) plan.whole_from = std::numeric_limits<int>::max();
  return plan;
}

}  // namespace ringlet
