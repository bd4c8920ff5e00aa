// Which of a few ways to do the same thing takes the least time: a trial finds out by doing it each way.
//
// What is quickest depends on where the ranks run, and whether their data are in the caches. Cores of a virtual machine
// move, and a program's tensors may be either. So no table can say it. Now and then a trial takes a few uses in a row
// each way, and times them. The least time of each way counts: other uses may have been interrupted. The quickest way is
// kept until the next trial. Trials that change nothing become rare.
//
// Contract: times() before each use, which then goes way(). If it says so, took() follows before the next times().
// Ranks whose trials must agree make the same uses, and so are at the same use of a trial at the same time. Where
// `is_due()`, they exchange what each way cost, and all decide() by the same costs, before times(). Without that,
// times() decides by the trial's own costs. Thread safety: one thread at a time.
#pragma once

#include <algorithm>
#include <array>
#include <limits>

namespace ringlet {

class Trial {
 public:
  static constexpr int kMostWays = 3;
  static constexpr float kUnknown = std::numeric_limits<float>::infinity();
  using Costs = std::array<float, kMostWays>;  // of each way, in the user's unit; kUnknown: never timed

  struct Terms {
    unsigned samples;                  // uses of each way that are timed
    unsigned settling;                 // uses before that: until the caches are as this way leaves them
    unsigned least_pause, most_pause;  // uses between two trials
    float clearly;                     // another way is taken if it costs less than this share
  };

  Trial() = default;  // of one way
  /// Way 0 is the first that is used. `known`: ways of known cost are not tried.
  Trial(int ways, const Terms& terms, const Costs& known = {kUnknown, kUnknown, kUnknown})
      : terms_(terms), known_(known), costs_(known), ways_(ways), pause_(terms.least_pause), left_(terms.least_pause) {}

  /// Counts a use. Returns whether it is to be timed.
  bool times() {
    if (ways_ == 1) return false;
    if (is_due()) decide(costs_);
    if (left_ == 0) next_way();
    --left_;
    return is_trying() && left_ < terms_.samples;
  }

  /// The use that was to be timed cost so much.
  void took(double cost) {
    float& least = costs_[static_cast<size_t>(way())];
    least = std::min(least, static_cast<float>(cost));
  }

  /// The way of the last use that was counted.
  int way() const { return is_trying() ? (best_ + turn_) % ways_ : best_; }

  /// Whether the next use is one of a trial, or the first after it.
  bool is_trying_next() const { return ways_ > 1 && (left_ == 0 || is_trying()); }
  bool is_due() const { return is_trying() && left_ == 0 && turn_after(turn_) == ways_; }

  const Costs& costs() const { return costs_; }

  /// Ends the trial that is due.
  void decide(const Costs& costs) {
    const auto end = costs.begin() + ways_;
    const int quickest = static_cast<int>(std::min_element(costs.begin(), end) - costs.begin());
    const bool turns = costs[static_cast<size_t>(quickest)] < terms_.clearly * costs[static_cast<size_t>(best_)];
    if (turns) best_ = quickest;
    pause_ = turns ? terms_.least_pause : std::min(2 * pause_, terms_.most_pause);
    left_ = pause_;
    turn_ = kResting;
    costs_ = known_;
  }

 private:
  static constexpr int kResting = -1;

  bool is_trying() const { return turn_ != kResting; }

  int turn_after(int turn) const {
    do ++turn;
    while (turn < ways_ && known_[static_cast<size_t>((best_ + turn) % ways_)] != kUnknown);
    return turn;
  }

  void next_way() {
    turn_ = turn_after(turn_);
    left_ = terms_.samples + (turn_ == 0 ? 0 : terms_.settling);  // the way in use is settled
  }

  Terms terms_{};
  Costs known_{}, costs_{};
  int ways_ = 1, best_ = 0;
  int turn_ = kResting;            // the way under trial, counted from the best
  unsigned pause_ = 0, left_ = 0;  // uses until the next way, or the next trial
};

}  // namespace ringlet
