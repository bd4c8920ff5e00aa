#include "engine/pull/plan.h"

#include <algorithm>
#include <array>

#include "base/error.h"
#include "engine/plan_inputs.h"
#include "transport/control.h"

namespace ringlet {
namespace {

struct Reader {
  int peer;
  int round;  // the peer's round in which it reads
};

/// A write to one chunk in one round.
struct Item {
  int chunk;
  bool reduces = false;
  std::vector<Source> sources;  // peers', in step order
  std::vector<Reader> needs;    // the sources' ranks and the rounds in which they send
};

int staging_buffers(const Placement& placement) {
  int used = 0;
  const auto note = [&](Space space) {
    if (space == Space::staging_a) used = std::max(used, 1);
    if (space == Space::staging_b) used = 2;
  };
  for (const PlacedRound& round : placement.rounds) {
    for (const ChunkState& state : round.before) {
      note(state.own);
      note(state.shared);
    }
    for (const PlacedWrite& write : round.writes) note(write.to);
  }
  return used;
}

std::vector<Placement> place_all(const PlanInputs& inputs, bool in_place) {
  std::vector<Placement> placements;
  for (int q = 0; q < inputs.world(); ++q) {
    placements.push_back(place_chunks(inputs.schedules[q], inputs.inputs[q], inputs.outputs[q], in_place));
  }
  return placements;
}

int copy_accesses(const PlanInputs& inputs, bool in_place) {
  int accesses = 0;
  for (const Placement& placement : place_all(inputs, in_place)) accesses += copy_accesses(placement);
  return accesses;
}

class Planner {
 public:
  /// `placements`: place_all(inputs, in_place).
  Planner(const PlanInputs& inputs, int rank, bool in_place, const std::vector<Placement>& placements)
      : inputs_(inputs),
        rank_(rank),
        rounds_(inputs.schedules[rank].rounds),
        matches_(inputs.matches[rank]),
        placements_(placements) {
    for (const Placement& placement : placements_) {
      plan_.staging_buffers = std::max(plan_.staging_buffers, staging_buffers(placement));
    }
    plan_.parts = inputs.schedules[rank].parts;
    plan_.rounds = static_cast<int>(rounds_.size());
    plan_.in_place = in_place;
    readers_.resize(plan_.parts);
    known_.resize(placements_.size(), 0);
  }

  Plan make() {
    for (int r = 0; r < plan_.rounds; ++r) plan_round(r);
    publish(kCompleted);
    if (plan_.rounds == 0) deliver_input();
    for (const Item& item : late_) {
      wait_for_readers(readers_[item.chunk][0]);
      emit(item, Space::output, false, false, false);
    }
    plan_.body = plan_.steps.size();
    if (plan_.in_place) {
      for (auto& spaces : readers_) wait_for_readers(spaces[0]);  // the caller may write its tensor after the call
    }
    return std::move(plan_);
  }

 private:
  using Readers = std::array<std::vector<Reader>, 3>;  // of the tensor, stage a, stage b

  static int slot(Space space) { return space == Space::staging_a ? 1 : space == Space::staging_b ? 2 : 0; }

  const PlacedRound& placed(int rank, int round) const { return placements_[rank].rounds[round]; }

  void plan_round(int r) {
    const PlacedRound& here = placed(rank_, r);
    for (const int c : here.published) {
      const ChunkState& state = here.before[c];
      wait_for_readers(readers_[c][slot(state.shared)]);
      emit({c, false, {{rank_, c, state.own, state.raw}}, {}}, state.shared, false, false, true);
    }
    // In place, the call signature already tells the peers that they can read the input.
    if (!(plan_.in_place && r == 0)) publish(ready(r));
    if (r == 0) deliver_input();
    note_readers(r);
    std::vector<Item> items = collect(r);
    for (Item& item : items) plan_item(item, r);
  }

  /// Chunks of this rank's input that are also part of its output, and that no step of the schedule writes.
  void deliver_input() {
    const Placement& mine = placements_[rank_];
    const Chunks& output = inputs_.outputs[rank_];
    for (int c = output.first; c < output.end(); ++c) {
      if (!mine.after[c].raw) continue;
      emit({c, false, {{rank_, c, Space::input, true}}, {}}, Space::output, false, false, false);
    }
  }

  void note_readers(int r) {
    const auto& steps = rounds_[r].steps;
    for (size_t s = 0; s < steps.size(); ++s) {
      if (steps[s].verb != Verb::send) continue;
      const Match& match = matches_[r][s];
      for (int c = steps[s].first; c < steps[s].first + steps[s].count; ++c) {
        readers_[c][slot(placed(rank_, r).before[c].shared)].push_back({match.peer, match.peer_round});
      }
    }
  }

  std::vector<Item> collect(int r) {
    std::vector<Item> items;
    std::vector<int> index(plan_.parts, -1);
    const auto& steps = rounds_[r].steps;
    for (size_t s = 0; s < steps.size(); ++s) {
      const Step& step = steps[s];
      if (step.verb == Verb::send) continue;
      const Match& match = matches_[r][s];
      if (step.count == 0) wait(match.peer, ready(match.peer_round));  // no data, only the wait: a barrier
      for (int i = 0; i < step.count; ++i) {
        const int chunk = (step.verb == Verb::copy ? step.peer : step.first) + i;
        if (index[chunk] < 0) {
          index[chunk] = static_cast<int>(items.size());
          items.push_back({chunk, step.verb == Verb::reduce, {}, {}});
        }
        add_source(items[index[chunk]], step, match, r, i);
      }
    }
    return items;
  }

  void add_source(Item& item, const Step& step, const Match& match, int r, int i) {
    if (step.verb == Verb::copy) {
      const ChunkState& own = placed(rank_, r).before[step.first + i];
      item.sources.push_back({rank_, step.first + i, own.own, own.raw});
      return;
    }
    const int chunk = match.peer_first + i;
    const ChunkState& theirs = placed(match.peer, match.peer_round).before[chunk];
    item.sources.push_back({match.peer, chunk, theirs.shared, theirs.raw && theirs.shared == Space::input});
    item.needs.push_back({match.peer, match.peer_round});
  }

  void plan_item(Item& item, int r) {
    const PlacedWrite& write = placed(rank_, r).writes[item.chunk];
    for (const Reader& need : item.needs) {
      // In place, peers can read inputs as soon as the call signature is published. The engine waits for that once.
      if (!plan_.in_place || need.round > 0) wait(need.peer, ready(need.round));
    }
    Readers& readers = readers_[item.chunk];
    wait_for_readers(readers[slot(write.to)]);
    if (write.tee) wait_for_readers(readers[0]);
    bool finish = false;
    if (item.reduces) {
      const ChunkState& own = placed(rank_, r).before[item.chunk];
      item.sources.push_back({rank_, item.chunk, own.own, own.raw, is_staging(own.shared) ? own.shared : Space::none});
      std::stable_sort(item.sources.begin(), item.sources.end(),
                       [](const Source& a, const Source& b) { return a.rank < b.rank; });
      finish = inputs_.complete(rank_, r, item.chunk);
    }
    const bool read_later = write.later || is_staging(write.to) ||
                            placements_[rank_].after[item.chunk].own != write.to || sent_after(item.chunk, r) ||
                            written_after(item.chunk, r);
    emit(item, write.to, write.tee, finish, read_later);
    if (write.later) late_.push_back({item.chunk, false, {{rank_, item.chunk, write.to, false}}, {}});
  }

  bool used_after(int chunk, int r, bool sends) const {
    for (size_t later = static_cast<size_t>(r) + 1; later < rounds_.size(); ++later) {
      for (const Step& step : rounds_[later].steps) {
        if (Chunks{step.first, step.count}.contains(chunk) && (step.verb == Verb::send) == sends) return true;
      }
    }
    return false;
  }
  bool sent_after(int chunk, int r) const { return used_after(chunk, r, true); }
  bool written_after(int chunk, int r) const { return used_after(chunk, r, false); }

  void publish(uint32_t phase) {
    PlanStep step{PlanStep::Kind::publish};
    step.phase = phase;
    plan_.steps.push_back(step);
  }

  void wait(int peer, uint32_t phase) {
    if (peer == rank_ || known_[peer] >= phase) return;
    known_[peer] = phase;
    PlanStep step{PlanStep::Kind::wait};
    step.peer = peer;
    step.phase = phase;
    plan_.steps.push_back(step);
  }

  void wait_for_readers(std::vector<Reader>& readers) {
    for (const Reader& reader : readers) wait(reader.peer, ready(reader.round + 1));
    readers.clear();
  }

  /// Appends a combine step, or lengthens the last one if this one continues it chunk by chunk.
  void emit(const Item& item, Space to, bool tee, bool finish, bool read_later) {
    plan_.most_sources = std::max(plan_.most_sources, static_cast<int>(item.sources.size()));
    if (!plan_.steps.empty() && continues(plan_.steps.back(), item, to, tee, finish)) {
      ++plan_.steps.back().chunks;
      plan_.steps.back().read_later |= read_later;
      return;
    }
    PlanStep step{PlanStep::Kind::combine};
    step.to = to;
    step.tee = tee;
    step.finish = finish;
    step.read_later = read_later;
    step.chunk = item.chunk;
    step.first_source = static_cast<int>(plan_.sources.size());
    step.sources = static_cast<int>(item.sources.size());
    plan_.sources.insert(plan_.sources.end(), item.sources.begin(), item.sources.end());
    plan_.steps.push_back(step);
  }

  bool continues(const PlanStep& last, const Item& item, Space to, bool tee, bool finish) const {
    if (last.kind != PlanStep::Kind::combine || last.to != to || last.tee != tee || last.finish != finish ||
        last.chunk + last.chunks != item.chunk || last.sources != static_cast<int>(item.sources.size())) {
      return false;
    }
    for (int i = 0; i < last.sources; ++i) {
      const Source& before = plan_.sources[last.first_source + i];
      const Source& now = item.sources[i];
      if (before.rank != now.rank || before.space != now.space || before.raw != now.raw ||
          before.staged != now.staged || before.chunk + last.chunks != now.chunk) {
        return false;
      }
    }
    return true;
  }

  const PlanInputs& inputs_;
  const int rank_;
  const std::vector<Round>& rounds_;                // of this rank, as the next
  const std::vector<std::vector<Match>>& matches_;  // by round and step
  const std::vector<Placement>& placements_;        // by rank
  std::vector<Readers> readers_;                    // by chunk: peers that may still read it
  std::vector<uint32_t> known_;                     // by peer: the last phase that this rank has waited for
  std::vector<Item> late_;                          // results that go from a staging buffer to the output at the end
  Plan plan_;
};

Plan plan_of(const PlanInputs& inputs, int rank, bool in_place) {
  const std::vector<Placement> placements = place_all(inputs, in_place);
  return Planner(inputs, rank, in_place, placements).make();
}

/// Whether all ranks' plans come to their end. A rank waits before it writes what a peer has still to read, so ranks may
/// wait in a circle though their messages do not. Tests show that the built-in algorithms never do.
bool all_end(const PlanInputs& inputs, bool in_place) {
  if (inputs.algorithm.authored == nullptr) return true;
  const auto world = static_cast<size_t>(inputs.world());
  const std::vector<Placement> placements = place_all(inputs, in_place);
  std::vector<Plan> plans;
  for (int q = 0; q < inputs.world(); ++q) plans.push_back(Planner(inputs, q, in_place, placements).make());
  std::vector<size_t> next(world, 0);
  std::vector<uint32_t> told(world, 0);
  const auto goes_on = [&](size_t q) {
    if (next[q] == plans[q].steps.size()) return false;
    const PlanStep& step = plans[q].steps[next[q]];
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
    if (next[q] < plans[q].steps.size()) return false;
  }
  return true;
}

/// The staged plan, if there is one.
Plan staged_plan(const PlanInputs& inputs, int rank) {
  if (all_end(inputs, false)) return plan_of(inputs, rank, false);
  const Algorithm& algorithm = inputs.algorithm;
  throw InvalidUsage(
      std::string(name(algorithm.collective)) + " algorithm \"" + algorithm.name +
      "\": ranks that read each other's memory would wait in a circle: a rank may overwrite a chunk only "
      "after its readers have ended their round: put these steps into other rounds");
}

}  // namespace

Plan make_plan(const Algorithm& algorithm, const RankInfo& info, bool in_place) {
  const PlanInputs inputs(algorithm, info);
  return in_place ? plan_of(inputs, info.rank, true) : staged_plan(inputs, info.rank);
}

Plan make_faster_plan(const Algorithm& algorithm, const RankInfo& info) {
  const PlanInputs inputs(algorithm, info);
  const bool in_place = copy_accesses(inputs, true) < copy_accesses(inputs, false) && all_end(inputs, true);
  return in_place ? plan_of(inputs, info.rank, true) : staged_plan(inputs, info.rank);
}

bool ends_in_place(const Algorithm& algorithm, const RankInfo& info) {
  return algorithm.authored == nullptr || all_end(PlanInputs(algorithm, info), true);
}

}  // namespace ringlet
