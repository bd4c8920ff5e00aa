// Whether what a rank stages goes through its caches or past them, tried for calls of like size.
//
// A store to a line that another core has read waits until that core has given the line up. Between distant cores of an
// AMD Zen 4 such stores hardly overlap, and are many times slower than the peer's reads. A store past the caches does
// not wait, but the reader fetches the line from memory, which is slower than from a near core's cache. So the ranks try
// both, and each keeps what took it less time to stage and to combine, without its waits. All try the same way at the
// same calls, because what a way costs the reader is a part of it, and so pauses are of one length. What a way costs also
// depends on how the staging area was written before, so each way first goes twice around the area, or for 128 calls
// (docs/decisions/0075-a-way-is-timed-in-its-own-wake.md).
//
// Contract: begin(), a Timer for each combination of the call, end(). Thread safety: one thread at a time.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <chrono>
#include <cstddef>

#include "base/trial.h"
#include "transport/transport.h"

namespace ringlet {

class StagingTrials {
  using Clock = std::chrono::steady_clock;

 public:
  StagingTrials() {
    for (size_t i = 0; i < by_size_.size(); ++i) by_size_[i] = Trial(2, terms(size_t{1} << i));
  }

  /// `bytes`: of a call. `tries`: this call takes part, as it does on all ranks.
  void begin(size_t bytes, bool tries) {
    const size_t width = std::bit_width(std::max<size_t>(bytes, 1));  // a table may let calls of nothing take part
    trial_ = tries ? &by_size_[std::min(width, by_size_.size()) - 1] : nullptr;
    timing_ = tries && trial_->times();
    spent_ = 0;
  }
  bool go_past() const { return trial_ != nullptr && trial_->way() == kPast; }
  void end() {
    if (timing_) [[unlikely]]
      trial_->took(spent_);
  }

  /// Counts its own life as spent in combining.
  class Timer {
   public:
    explicit Timer(StagingTrials& trials) : trials_(trials) {
      if (trials_.timing_) [[unlikely]]
        began_ = Clock::now();
    }
    ~Timer() {
      if (trials_.timing_) [[unlikely]]
        trials_.spent_ += std::chrono::duration<double, std::nano>(Clock::now() - began_).count();
    }
    Timer(const Timer&) = delete;
    Timer& operator=(const Timer&) = delete;

   private:
    StagingTrials& trials_;
    Clock::time_point began_{};
  };

 private:
  static constexpr int kPast = 1;

  static constexpr Trial::Terms terms(size_t bytes) {
    const auto settling = static_cast<unsigned>(std::clamp<size_t>(2 * RegionLayout::kStagingBytes / bytes, 8, 128));
    const unsigned pause = std::max(1024U, 64 * settling);
    return {.samples = 4,
            .settling = settling,
            .least_pause = pause,
            .most_pause = pause,
            .clearly = 0.9F,
            .first_pause = settling};
  }

  std::array<Trial, 24> by_size_;
  Trial* trial_ = nullptr;  // of the call in progress; null: it goes through the caches
  bool timing_ = false;
  double spent_ = 0;  // nanoseconds
};

}  // namespace ringlet
