#include "plan/placement.h"

#include <algorithm>
#include <limits>

namespace ringlet {

Placement::Placement(const RankSchedule& schedule, Reach reach)
    : schedule_(schedule), reach_(reach), chunks_(static_cast<size_t>(schedule.parts)) {
  const Home shared = reach == Reach::staged ? Home::none : Home::input;
  for (int c = schedule.input.first; c < schedule.input.end(); ++c) chunks_[c].place = {Home::input, shared, true};
  if (reach != Reach::messages) look_ahead();
}

/// From the last round to the first: what becomes of each value that is written.
void Placement::look_ahead() {
  constexpr int kNever = std::numeric_limits<int>::max();
  struct Next {
    int send = kNever, write = kNever;
    bool read = false;  // a step of this rank starts from it
  };
  std::vector<Next> next(chunks_.size());
  for (const Step& step : schedule_.steps) next_use_ += step.verb == Verb::send ? 0 : static_cast<size_t>(step.count);
  uses_.resize(next_use_);
  for (int r = schedule_.rounds() - 1; r >= 0; --r) {
    const auto steps = schedule_.round(r);
    for (auto step = steps.rbegin(); step != steps.rend(); ++step) {
      for (int i = step->verb == Verb::send ? 0 : step->count; i-- > 0;) {
        const Next& after = next[target(*step) + i];
        // Peers read a value in the rounds after r, and also in the round that overwrites it, which sends the old one.
        const bool is_sent = after.send != kNever && after.send <= after.write;
        const bool is_used = after.send != kNever || after.read;
        uses_[--next_use_] =
            static_cast<uint8_t>((after.write == kNever ? last : 0) | (is_sent ? sent : 0) | (is_used ? used : 0));
      }
    }
    for (const Step& step : steps) {
      for (int i = 0; i < step.count; ++i) {
        if (step.verb == Verb::send) {
          next[step.first + i].send = r;
        } else {
          next[step.first + i].read = true;
          next[target(step) + i].write = r;
        }
      }
    }
  }
}

void Placement::begin(int round) {
  round_ = round;
  published_.clear();
  for (const Step& step : schedule_.round(round)) {
    for (int i = 0; i < step.count && reach_ != Reach::messages; ++i) {
      Chunk& chunk = chunks_[(step.verb == Verb::send ? step.first : target(step)) + i];
      if (step.verb != Verb::send) {
        chunk.uses = uses_[next_use_++];
        continue;
      }
      chunk.sent_in = round;
      if (chunk.place.shared != Home::none) continue;
      chunk.place.shared = take_staging(chunk);
      published_.push_back(step.first + i);
    }
  }
  std::sort(published_.begin(), published_.end());
  copy_accesses_ += 2 * static_cast<int>(published_.size());
}

PlacedWrite Placement::write(int c) {
  Chunk& chunk = chunks_[c];
  chunk.written_in = round_;
  const bool output = schedule_.output.contains(c);
  if (reach_ == Reach::messages) {
    const Home to = output ? Home::output : Home::work;
    chunk.place = {to, to, false};
    return {to};
  }
  const bool is_last = chunk.uses & last, is_sent = chunk.uses & sent, read_now = chunk.sent_in == round_;
  const bool in_place = reach_ == Reach::in_place;
  PlacedWrite write;
  if (output && (in_place ? !read_now || is_staging(chunk.place.shared) : !is_sent)) {
    write.to = Home::output;
  } else {
    write.to = take_staging(chunk);
    (in_place ? write.later : write.tee) = output && is_last;
  }
  write.read_later = write.later || is_staging(write.to) || !is_last || (chunk.uses & used) != 0;
  copy_accesses_ += 2 * write.later + write.tee;
  chunk.place = {write.to, in_place || is_staging(write.to) ? write.to : Home::none, false};
  return write;
}

void Placement::write_all() {
  for (const Step& step : schedule_.round(round_)) {
    for (int i = 0; i < step.count && step.verb != Verb::send; ++i) {
      if (chunks_[target(step) + i].written_in != round_) write(target(step) + i);
    }
  }
}

Home Placement::take_staging(Chunk& chunk) {
  const Home taken = chunk.next_staging;
  const bool first = taken == Home::staging_a;
  chunk.next_staging = first ? Home::staging_b : Home::staging_a;
  staging_buffers_ = std::max(staging_buffers_, first ? 1 : 2);
  return taken;
}

}  // namespace ringlet
