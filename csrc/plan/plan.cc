#include "plan/plan.h"

#include <algorithm>
#include <tuple>

namespace ringlet {
namespace {

class Lowering {
 public:
  Lowering(const Schedules& schedules, int rank, Reach reach)
      : schedules_(schedules),
        rank_(rank),
        mine_(schedules[rank]),
        placement_(mine_, reach),
        chunks_(static_cast<size_t>(mine_.parts)),
        sent_to_(static_cast<size_t>(schedules.world())),
        received_from_(sent_to_.size()) {
    plan_.parts = mine_.parts;
    plan_.input = mine_.input;
    plan_.output = mine_.output;
  }

  Plan make() {
    for (int r = 0; r < mine_.rounds(); ++r) lower_round(r);
    for (int c = plan_.output.first; c < plan_.output.end(); ++c) {
      if (placement_.of(c).raw) plan_.delivered.push_back(c);
    }
    return std::move(plan_);
  }

 private:
  struct Chunk {
    int used = 0;         // the first round after the last one before this that used it
    int copied_in = -1;   // the last round in which a copy uses it
    int written_in = -1;  // the last round that writes it ...
    int item = 0;         // ... and where in items_
  };
  struct Item {
    int chunk;
    bool reduces;
  };
  struct Part {
    int item;
    Source source;
  };

  void lower_round(int r) {
    Plan::Round& round = plan_.rounds.emplace_back();
    items_.clear();
    parts_.clear();
    placement_.begin(r);
    round.published.first = static_cast<int>(plan_.published.size());
    for (const int c : placement_.published()) {
      const Place& place = placement_.of(c);
      plan_.published.push_back({c, place.shared});
      plan_.published.back().first_source = static_cast<int>(plan_.sources.size());
      plan_.sources.push_back({rank_, c, place.own, place.raw});
    }
    round.published.count = static_cast<int>(plan_.published.size()) - round.published.first;
    for (const Step& step : mine_.round(r)) {
      if (step.verb == Verb::copy) copy(step, r);
    }
    round.sent.first = static_cast<int>(plan_.sent.size());
    round.received.first = static_cast<int>(plan_.received.size());
    for (uint32_t s = mine_.begin[r]; s < mine_.begin[r + 1]; ++s) {
      if (mine_.steps[s].verb == Verb::send) send(s);
      if (receives(mine_.steps[s])) receive(s, r);
    }
    round.sent.count = static_cast<int>(plan_.sent.size()) - round.sent.first;
    round.received.count = static_cast<int>(plan_.received.size()) - round.received.first;
    combine(round);
    mark(round, r);
  }

  void add(int chunk, int r, bool reduces, const Source& source) {
    Chunk& state = chunks_[chunk];
    if (state.written_in != r) {
      state.written_in = r;
      state.item = static_cast<int>(items_.size());
      items_.push_back({chunk, reduces});
    }
    parts_.push_back({state.item, source});
  }

  void copy(const Step& step, int r) {
    for (int i = 0; i < step.count; ++i) {
      const Place& from = placement_.of(step.first + i);
      add(step.peer + i, r, false, {rank_, step.first + i, from.own, from.raw});
      chunks_[step.first + i].copied_in = chunks_[step.peer + i].copied_in = r;
    }
  }

  Transfer message(uint32_t s, uint32_t index, size_t place) const {
    const Step& step = mine_.steps[s];
    const RankSchedule& theirs = schedules_[step.peer];
    const uint32_t end = mine_.match[s];
    const Step& other = theirs.steps[end];
    return {step.peer,
            index,
            step.first,
            step.count,
            theirs.round_of(end),
            other.first,
            static_cast<int>(place),
            step.verb == Verb::reduce || other.verb == Verb::reduce};
  }

  void send(uint32_t s) {
    const Step& step = mine_.steps[s];
    plan_.sent.push_back(message(s, sent_to_[step.peer]++, plan_.sent_homes.size()));
    for (int i = 0; i < step.count; ++i) plan_.sent_homes.push_back(placement_.of(step.first + i).shared);
  }

  void receive(uint32_t s, int r) {
    const Step& step = mine_.steps[s];
    const int number = static_cast<int>(plan_.received.size());
    Transfer& made = plan_.received.emplace_back(message(s, received_from_[step.peer]++, plan_.all_received));
    plan_.all_received += step.count;
    if (made.reduces) made.free_from = r + 1;
    for (int i = 0; i < step.count; ++i) {
      const Chunk& chunk = chunks_[step.first + i];
      made.free_from = std::max(made.free_from, chunk.copied_in == r ? r + 1 : chunk.used);
      add(step.first + i, r, made.reduces, {step.peer, made.peer_first + i, Home::incoming, false, Home::none, number});
    }
  }

  /// All that is written to one chunk is one combine, in rank order.
  void combine(Plan::Round& round) {
    for (size_t i = 0; i < items_.size(); ++i) {
      if (!items_[i].reduces) continue;
      const int c = items_[i].chunk;
      const Place& own = placement_.of(c);
      parts_.push_back(
          {static_cast<int>(i), {rank_, c, own.own, own.raw, is_staging(own.shared) ? own.shared : Home::none}});
    }
    const auto key = [](const Part& part) { return std::tuple(part.item, part.source.rank, part.source.message); };
    std::sort(parts_.begin(), parts_.end(), [&](const Part& a, const Part& b) { return key(a) < key(b); });
    round.combines = {static_cast<int>(plan_.combines.size()), static_cast<int>(items_.size())};
    auto part = parts_.begin();
    for (size_t i = 0; i < items_.size(); ++i) {
      const PlacedWrite write = placement_.write(items_[i].chunk);
      Combine one{items_[i].chunk, write.to, write.tee, write.later, false, write.read_later};
      one.first_source = static_cast<int>(plan_.sources.size());
      for (; part != parts_.end() && part->item == static_cast<int>(i); ++part) plan_.sources.push_back(part->source);
      one.sources = static_cast<int>(plan_.sources.size()) - one.first_source;
      plan_.most_sources = std::max(plan_.most_sources, one.sources);
      plan_.combines.push_back(one);
    }
  }

  /// What the round leaves for later ones, and which combines are the last of their chunks.
  void mark(const Plan::Round& round, int r) {
    for (const Step& step : mine_.round(r)) {
      for (int i = 0; i < step.count; ++i) {
        chunks_[step.first + i].used = r + 1;
        if (step.verb == Verb::copy) chunks_[step.peer + i].used = r + 1;
        if (step.verb != Verb::reduce) continue;
        plan_.combines[round.combines.first + chunks_[step.first + i].item].finish =
            schedules_.complete(rank_, reduced_++);
      }
    }
    for (int m = round.sent.first; m < round.sent.first + round.sent.count; ++m) {
      Transfer& sent = plan_.sent[m];
      sent.last = r + 1 == mine_.rounds();
      for (int c = sent.first; c < sent.first + sent.count; ++c) sent.overwritten |= chunks_[c].written_in == r;
    }
  }

  const Schedules& schedules_;
  const int rank_;
  const RankSchedule& mine_;
  Placement placement_;
  std::vector<Chunk> chunks_;
  std::vector<uint32_t> sent_to_, received_from_;  // by peer: messages so far
  std::vector<Item> items_;                        // of the round: chunks that are written
  std::vector<Part> parts_;                        // of the round: what they are made of
  size_t reduced_ = 0;                             // chunks that this rank's steps have reduced
  Plan plan_;
};

}  // namespace

Plan lower(const Schedules& schedules, int rank, Reach reach) { return Lowering(schedules, rank, reach).make(); }

Placements place_all(const Schedules& schedules, int rank, Reach reach) {
  const RankSchedule& mine = schedules[rank];
  Placements found;
  for (const Step& step : mine.steps) {
    if (receives(step)) found.received.resize(found.received.size() + static_cast<size_t>(step.count));
  }
  for (int q = 0; q < schedules.world(); ++q) {
    const RankSchedule& theirs = schedules[q];
    Placement placement(theirs, reach);
    for (int r = 0; r < theirs.rounds(); ++r) {
      placement.begin(r);
      for (uint32_t s = theirs.begin[r]; s < theirs.begin[r + 1]; ++s) {
        const Step& step = theirs.steps[s];
        if (step.verb != Verb::send || step.peer != rank) continue;
        for (int i = 0; i < step.count; ++i)
          found.received[mine.place[theirs.match[s]] + static_cast<uint32_t>(i)] = placement.of(step.first + i);
      }
      placement.write_all();
    }
    found.staging_buffers = std::max(found.staging_buffers, placement.staging_buffers());
    found.copy_accesses += placement.copy_accesses();
  }
  return found;
}

}  // namespace ringlet
