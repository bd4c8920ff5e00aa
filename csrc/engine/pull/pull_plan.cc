#include "engine/pull/pull_plan.h"

#include <algorithm>
#include <array>
#include <string>

#include "base/error.h"
#include "transport/control.h"

namespace ringlet {
namespace {

/// Adds waits and publications to a plan.
class Hazards {
 public:
  Hazards(const Schedules& schedules, int rank, Reach reach)
      : rank_(rank),
        in_place_(reach == Reach::in_place),
        plan_(lower(schedules, rank, reach)),
        readers_(static_cast<size_t>(plan_.parts)),
        known_(static_cast<size_t>(schedules.world()), 0) {
    pull_.parts = plan_.parts;
    pull_.rounds = static_cast<int>(plan_.rounds.size());
    pull_.in_place = in_place_;
  }

  /// Where peers have what they publish; without it the steps are right, but not what they read.
  void find_sources(const Placements& placements) {
    pull_.staging_buffers = placements.staging_buffers;
    for (Source& source : plan_.sources) {
      if (source.message < 0) continue;
      const Place& theirs = placements.received[plan_.place_of(source)];
      source.home = theirs.shared;
      source.raw = theirs.raw && theirs.shared == Home::input;
    }
  }

  PullPlan make() {
    for (int r = 0; r < pull_.rounds; ++r) plan_round(r);
    publish(kCompleted);
    if (pull_.rounds == 0) deliver_input();
    for (const Combine& one : plan_.combines) {
      if (!one.later) continue;
      wait_for_readers(readers_[one.chunk][0]);
      copy(one.chunk, one.to, false);
    }
    pull_.body = pull_.steps.size();
    if (in_place_) {
      for (auto& homes : readers_) wait_for_readers(homes[0]);  // the caller may write its tensor after the call
    }
    return std::move(pull_);
  }

 private:
  struct Reader {
    int peer;
    int round;  // the peer's round in which it reads
  };
  using Readers = std::array<std::vector<Reader>, 3>;  // of the tensor, stage a, stage b

  static int slot(Home home) { return home == Home::staging_a ? 1 : home == Home::staging_b ? 2 : 0; }

  void plan_round(int r) {
    const Plan::Round& round = plan_.rounds[r];
    for (const Combine& one : Plan::part(plan_.published, round.published)) {
      wait_for_readers(readers_[one.chunk][slot(one.to)]);
      emit(one, plan_.sources_of(one));
    }
    // In place, the call signature already tells the peers that they can read the input.
    if (!(in_place_ && r == 0)) publish(ready(r));
    if (r == 0) deliver_input();
    for (const Transfer& sent : Plan::part(plan_.sent, round.sent)) {
      for (int i = 0; i < sent.count; ++i)
        readers_[sent.first + i][slot(plan_.sent_homes[sent.place + i])].push_back({sent.peer, sent.peer_round});
    }
    for (const Transfer& received : Plan::part(plan_.received, round.received)) {
      if (received.count == 0) wait(received.peer, ready(received.peer_round));  // no data, only the wait: a barrier
    }
    if (r == 0 && !in_place_) wait_for_one(round);
    for (const Combine& one : Plan::part(plan_.combines, round.combines)) combine(one);
  }

  /// Local copies come first in a round. A peer's call is compared in the wait for it: nothing is written before that.
  void wait_for_one(const Plan::Round& round) {
    for (const Combine& one : Plan::part(plan_.combines, round.combines)) {
      for (const Source& source : plan_.sources_of(one)) {
        if (source.message < 0) continue;
        const Transfer& need = plan_.received[source.message];
        return wait(need.peer, ready(need.peer_round));
      }
    }
  }

  void deliver_input() {
    for (const int c : plan_.delivered) copy(c, Home::input, true);
  }

  void copy(int chunk, Home from, bool raw) {
    Combine one{chunk, Home::output};
    one.read_later = false;
    const Source source{rank_, chunk, from, raw};
    emit(one, {&source, 1});
  }

  void combine(const Combine& one) {
    needs_.clear();
    for (const Source& source : plan_.sources_of(one)) {
      if (source.message >= 0) needs_.push_back(source.message);
    }
    std::sort(needs_.begin(), needs_.end());
    for (const int message : needs_) {
      const Transfer& need = plan_.received[message];
      // In place, peers can read inputs as soon as the call signature is published. The engine waits for that once.
      if (!in_place_ || need.peer_round > 0) wait(need.peer, ready(need.peer_round));
    }
    wait_for_readers(readers_[one.chunk][slot(one.to)]);
    if (one.tee) wait_for_readers(readers_[one.chunk][0]);
    emit(one, plan_.sources_of(one));
  }

  void publish(uint32_t phase) {
    PlanStep step{PlanStep::Kind::publish};
    step.phase = phase;
    pull_.steps.push_back(step);
  }

  void wait(int peer, uint32_t phase) {
    if (peer == rank_ || known_[peer] >= phase) return;
    known_[peer] = phase;
    PlanStep step{PlanStep::Kind::wait};
    step.peer = peer;
    step.phase = phase;
    pull_.steps.push_back(step);
  }

  void wait_for_readers(std::vector<Reader>& readers) {
    for (const Reader& reader : readers) wait(reader.peer, ready(reader.round + 1));
    readers.clear();
  }

  /// Appends a combine step, or lengthens the last one if this one continues it chunk by chunk.
  void emit(const Combine& one, std::span<const Source> sources) {
    pull_.most_sources = std::max(pull_.most_sources, one.sources);
    if (!pull_.steps.empty() && continues(pull_.steps.back(), one, sources)) {
      ++pull_.steps.back().chunks;
      pull_.steps.back().read_later |= one.read_later;
      return;
    }
    PlanStep step{PlanStep::Kind::combine, one.to, one.tee, one.finish, one.read_later};
    step.chunk = one.chunk;
    step.first_source = static_cast<int>(pull_.sources.size());
    step.sources = one.sources;
    pull_.sources.insert(pull_.sources.end(), sources.begin(), sources.end());
    pull_.steps.push_back(step);
  }

  bool continues(const PlanStep& last, const Combine& one, std::span<const Source> sources) const {
    if (last.kind != PlanStep::Kind::combine || last.to != one.to || last.tee != one.tee || last.finish != one.finish ||
        last.chunk + last.chunks != one.chunk || last.sources != one.sources) {
      return false;
    }
    return std::equal(sources.begin(), sources.end(), pull_.sources.begin() + last.first_source,
                      [&](const Source& now, const Source& before) {
                        return before.rank == now.rank && before.home == now.home && before.raw == now.raw &&
                               before.staged == now.staged && before.chunk + last.chunks == now.chunk;
                      });
  }

  const int rank_;
  const bool in_place_;
  Plan plan_;
  std::vector<Readers> readers_;  // by chunk: peers that may still read it
  std::vector<uint32_t> known_;   // by peer: the last phase that this rank has waited for
  std::vector<int> needs_;        // messages of one combine
  PullPlan pull_;
};

PullPlan plan_of(const Schedules& schedules, int rank, Reach reach, const Placements& placements) {
  Hazards hazards(schedules, rank, reach);
  hazards.find_sources(placements);
  return hazards.make();
}

/// Whether all ranks' plans come to their end. A rank waits before it writes what a peer has still to read, so ranks may
/// wait in a circle though their messages do not. Tests show that the built-in algorithms never do.
bool all_end(const Algorithm& algorithm, const Schedules& schedules, Reach reach) {
  if (algorithm.authored == nullptr) return true;
  const auto world = static_cast<size_t>(schedules.world());
  std::vector<std::vector<PlanStep>> plans;
  for (int q = 0; q < schedules.world(); ++q) plans.push_back(Hazards(schedules, q, reach).make().steps);
  std::vector<size_t> next(world, 0);
  std::vector<uint32_t> told(world, 0);
  const auto goes_on = [&](size_t q) {
    if (next[q] == plans[q].size()) return false;
    const PlanStep& step = plans[q][next[q]];
    if (step.kind == PlanStep::Kind::wait && told[static_cast<size_t>(step.peer)] < step.phase) return false;
    if (step.kind == PlanStep::Kind::publish) told[q] = step.phase;
    ++next[q];
    return true;
  };
  for (bool moved = true; moved;) {
    moved = false;
    for (size_t q = 0; q < world; ++q) {
      while (goes_on(q)) moved = true;
    }
  }
  for (size_t q = 0; q < world; ++q) {
    if (next[q] < plans[q].size()) return false;
  }
  return true;
}

void refuse_circles(const Algorithm& algorithm, const Schedules& schedules) {
  if (all_end(algorithm, schedules, Reach::staged)) return;
  throw InvalidUsage(
      std::string(name(algorithm.collective)) + " algorithm \"" + algorithm.name +
      "\": ranks that read each other's memory would wait in a circle: a rank may overwrite a chunk only "
      "after its readers have ended their round: put these steps into other rounds");
}

}  // namespace

PullPlan make_pull_plan(const Algorithm& algorithm, const RankInfo& info, bool in_place) {
  const Schedules schedules(algorithm, info);
  if (!in_place) refuse_circles(algorithm, schedules);
  const Reach reach = in_place ? Reach::in_place : Reach::staged;
  return plan_of(schedules, info.rank, reach, place_all(schedules, info.rank, reach));
}

PullPlan make_faster_plan(const Algorithm& algorithm, const RankInfo& info) {
  const Schedules schedules(algorithm, info);
  const Placements in_place = place_all(schedules, info.rank, Reach::in_place);
  const Placements staged = place_all(schedules, info.rank, Reach::staged);
  if (in_place.copy_accesses < staged.copy_accesses && all_end(algorithm, schedules, Reach::in_place))
    return plan_of(schedules, info.rank, Reach::in_place, in_place);
  refuse_circles(algorithm, schedules);
  return plan_of(schedules, info.rank, Reach::staged, staged);
}

bool ends_in_place(const Algorithm& algorithm, const RankInfo& info) {
  return algorithm.authored == nullptr || all_end(algorithm, Schedules(algorithm, info), Reach::in_place);
}

}  // namespace ringlet
