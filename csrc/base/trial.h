// Which of a few ways to do the same thing takes the least time: a trial finds out by doing it each way.
//
// What is quickest depends on where the ranks run, and whether their data are in the caches. Cores of a virtual machine
// move, and a program's tensors may be either. So no table can say it. Now and then a trial takes a few uses in a row
// each way, and times them. The least time of each way counts: other uses may have been interrupted. A trial may fall
// on a moment when the caches have lost the data, so a second follows at once, and another way is taken only if both find
// the same. The next two come when these have cost no more than 2 % of the time since.
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
    unsigned settling;                 // uses before that: until memory and caches are as this way leaves them
    unsigned least_pause, most_pause;  // uses between trials, which come in twos
    float clearly;                     // another way is taken if it costs less than this share
    unsigned first_pause = 0;          // uses before the first trial; 0: least_pause
  };

  Trial() = default;  // of one way
  /// Way 0 is the first that is used.
  Trial(int ways, const Terms& terms)
      : terms_(terms), ways_(ways), left_(terms.first_pause != 0 ? terms.first_pause : terms.least_pause) {}

  /// Counts a use. Returns whether it is to be timed.
  bool times() {
    if (ways_ == 1) return false;
    if (is_due()) decide(costs_);
    if (left_ == 0) next_way();
    --left_;
    return is_trying() && left_ < terms_.samples;
  }

  /// The use that was to be timed cost so much. Nothing costs nothing, even if the clock has not moved.
  void took(double cost) {
    float& least = costs_[static_cast<size_t>(way())];
    least = std::min(least, std::max(static_cast<float>(cost), std::numeric_limits<float>::min()));
  }

  /// The way of the last use that was counted.
  int way() const { return is_trying() ? turn_ : best_; }

  /// Whether the next use is one of a trial, or the first after it.
  bool is_trying_next() const { return ways_ > 1 && (left_ == 0 || is_trying()); }
  bool is_due() const { return is_trying() && left_ == 0 && turn_ + 1 == ways_; }

  const Costs& costs() const { return costs_; }

  /// Ends the trial that is due, which is one of two.
  void decide(const Costs& costs) {
    const auto end = costs.begin() + ways_;
    const int quickest = static_cast<int>(std::min_element(costs.begin(), end) - costs.begin());
    const bool wins = costs[static_cast<size_t>(quickest)] < terms_.clearly * costs[static_cast<size_t>(best_)];
    const int found = wins ? quickest : best_;
    if (first_found_ == kNothing) {
      first_found_ = found;
      left_ = 0;
    } else {
      if (found == first_found_) best_ = found;
      first_found_ = kNothing;
      left_ = pause_after(costs);
    }
    turn_ = kResting;
    costs_ = kNone;
  }

 private:
  static constexpr Costs kNone{kUnknown, kUnknown, kUnknown};
  static constexpr int kResting = -1, kNothing = -1;
  static constexpr float kMostLost = 0.02F;  // of the time

  bool is_trying() const { return turn_ != kResting; }
  unsigned uses_of_a_way() const { return terms_.samples + terms_.settling; }

  /// In uses.
  unsigned pause_after(const Costs& costs) const {
    float lost = 0;  // in uses of the best way
    for (size_t way = 0; way < static_cast<size_t>(ways_); ++way) {
      if (costs[way] == kUnknown) continue;
      const float times_best = costs[way] / costs[static_cast<size_t>(best_)];
      lost += static_cast<float>(2 * uses_of_a_way()) * std::max(0.0F, times_best - 1);
    }
    const float most = static_cast<float>(terms_.most_pause);
    return static_cast<unsigned>(std::clamp(lost / kMostLost, static_cast<float>(terms_.least_pause), most));
  }

  void next_way() {
    ++turn_;
    left_ = uses_of_a_way();  // also of the way in use: another rank may have used another
  }

  Terms terms_{};
  Costs costs_ = kNone;
  int ways_ = 1, best_ = 0;
  int first_found_ = kNothing;  // which way the first of two trials found best
  int turn_ = kResting;         // the way under trial
  unsigned left_ = 0;           // uses until the next way, or the next trial
};

}  // namespace ringlet
