// Whether copies that another core reads take less time through the caches or past them.
//
// Which way is better depends on where writer and reader run, and a virtual machine's processors move. So now and then a
// trial compares a few copies each way, the writer's part and the reader's. The quicker way stays until the next trial.
// Trials that change nothing become rare.
//
// Contract: ask times() before each copy, unless one that is timed is not complete, and then past_cache().
// Thread safety: one thread at a time.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <limits>

namespace ringlet {

class QuickerWay {
 public:
  bool past_cache() const { return past_cache_ != (step_ == Step::other_way); }

  /// Whether the next copy is to be timed.
  bool times() {
    if (step_ == Step::pause) {
      if (--until_trial_ > 0) return false;
      begin(Step::this_way);
    }
    return --settling_ < 0;
  }

  /// The copy that was timed took so long, at the writer and at the reader.
  void took(size_t bytes, std::chrono::nanoseconds time) {
    double& least = least_[step_ == Step::other_way];
    least = std::min(least, static_cast<double>(time.count()) / static_cast<double>(bytes));
    if (--samples_ > 0) return;
    if (step_ == Step::this_way) return begin(Step::other_way);
    step_ = Step::pause;
    const bool turns = least_[1] < kClearly * least_[0];
    past_cache_ = past_cache_ != turns;
    pause_ = turns ? kLeastPause : std::min(2 * pause_, kMostPause);
    until_trial_ = pause_;
    least_[0] = least_[1] = kUnknown;
  }

 private:
  enum class Step { pause, this_way, other_way };

  static constexpr int kSamples = 4;    // the least of them counts: others may have been interrupted
  static constexpr int kSettling = 32;  // copies until most places were written this way
  static constexpr double kClearly = 0.9;
  static constexpr int kLeastPause = 64, kMostPause = 2048;  // copies between two trials
  static constexpr double kUnknown = std::numeric_limits<double>::max();

  void begin(Step step) {
    step_ = step;
    settling_ = step == Step::other_way ? kSettling : 0;
    samples_ = kSamples;
  }

  bool past_cache_ = false;
  Step step_ = Step::pause;
  int settling_ = 0, samples_ = 0;
  double least_[2] = {kUnknown, kUnknown};  // nanoseconds a byte: this way, and the other
  int pause_ = kLeastPause, until_trial_ = kLeastPause;
};

}  // namespace ringlet
