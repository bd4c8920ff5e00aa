#include "engine/pull/placement.h"

#include <limits>

namespace ringlet {
namespace {

constexpr int kNever = std::numeric_limits<int>::max();

/// In which rounds each chunk is sent and written by this rank.
struct Uses {
  Uses(const Schedule& schedule) : sends(schedule.parts), writes(schedule.parts) {
    for (int r = 0; r < static_cast<int>(schedule.rounds.size()); ++r) {
      for (const Step& step : schedule.rounds[r].steps) {
        const int first = step.verb == Verb::copy ? step.peer : step.first;
        for (int c = first; c < first + step.count; ++c) {
          auto& rounds = step.verb == Verb::send ? sends[c] : writes[c];
          if (rounds.empty() || rounds.back() != r) rounds.push_back(r);
        }
      }
    }
  }

  static int next_after(const std::vector<int>& rounds, int r) {
    for (const int round : rounds) {
      if (round > r) return round;
    }
    return kNever;
  }
  bool sent_in(int chunk, int round) const { return next_after(sends[chunk], round - 1) == round; }
  bool written_in(int chunk, int round) const { return next_after(writes[chunk], round - 1) == round; }

  std::vector<std::vector<int>> sends;
  std::vector<std::vector<int>> writes;
};

class Placer {
 public:
  Placer(const Schedule& schedule, const Chunks& input, const Chunks& output, bool in_place)
      : uses_(schedule),
        output_(output),
        in_place_(in_place),
        state_(schedule.parts),
        next_staging_(schedule.parts, Space::staging_a) {
    for (int c = input.first; c < input.end(); ++c) {
      state_[c] = {Space::input, in_place ? Space::input : Space::none, true};
    }
  }

  PlacedRound place_round(int r) {
    const int parts = static_cast<int>(state_.size());
    PlacedRound round;
    for (int c = 0; c < parts; ++c) {
      if (uses_.sent_in(c, r) && state_[c].shared == Space::none) {
        state_[c].shared = take_stage(c);
        round.published.push_back(c);
      }
    }
    round.before = state_;
    round.writes.resize(parts);
    for (int c = 0; c < parts; ++c) {
      if (uses_.written_in(c, r)) round.writes[c] = place_write(c, r);
    }
    return round;
  }

  std::vector<ChunkState> after() const { return state_; }

 private:
  PlacedWrite place_write(int c, int r) {
    const int next_write = Uses::next_after(uses_.writes[c], r);
    const bool last = next_write == kNever;
    // Peers read a value in the rounds after r, and also in the round that overwrites it, which sends the old value.
    const bool sent =
        Uses::next_after(uses_.sends[c], r) <= next_write && Uses::next_after(uses_.sends[c], r) != kNever;
    const bool output = output_.contains(c);
    const bool read_now = uses_.sent_in(c, r);
    PlacedWrite write;
    if (in_place_ && output && !(read_now && !is_staging(state_[c].shared))) {
      write.to = Space::output;
    } else if (in_place_) {
      write.to = take_stage(c);
      write.later = output && last;
    } else if (output && !sent) {
      write.to = Space::output;
    } else {
      write.to = take_stage(c);
      write.tee = output && last;
    }
    const bool reachable = in_place_ || is_staging(write.to);
    state_[c] = {write.to, reachable ? write.to : Space::none, false};
    return write;
  }

  Space take_stage(int c) {
    const Space taken = next_staging_[c];
    next_staging_[c] = taken == Space::staging_a ? Space::staging_b : Space::staging_a;
    return taken;
  }

  Uses uses_;
  Chunks output_;
  bool in_place_;
  std::vector<ChunkState> state_;
  std::vector<Space> next_staging_;
};

}  // namespace

int copy_accesses(const Placement& placement) {
  int accesses = 0;
  for (const PlacedRound& round : placement.rounds) {
    accesses += 2 * static_cast<int>(round.published.size());
    for (const PlacedWrite& write : round.writes) accesses += 2 * write.later + write.tee;
  }
  return accesses;
}

Placement place_chunks(const Schedule& schedule, const Chunks& input, const Chunks& output, bool in_place) {
  Placer placer(schedule, input, output, in_place);
  Placement placement;
  for (int r = 0; r < static_cast<int>(schedule.rounds.size()); ++r) placement.rounds.push_back(placer.place_round(r));
  placement.after = placer.after();
  return placement;
}

}  // namespace ringlet
