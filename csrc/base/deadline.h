// A point in time by which a wait must end. Absolute, so that it can be handed down through calls unchanged.
#pragma once

#include <time.h>

#include <algorithm>
#include <chrono>
#include <string>

namespace ringlet {

/// For error messages: "12.5 s".
inline std::string in_seconds(std::chrono::steady_clock::duration duration) {
  const auto ms = std::chrono::duration_cast<std::chrono::milliseconds>(duration).count();
  return std::to_string(ms / 1000) + "." + std::to_string(ms % 1000 / 100) + " s";
}

/// 100 years. A longer timeout counts as this one: it can be added to any time of the clock.
inline constexpr std::chrono::milliseconds kLongestTimeout = std::chrono::hours(24 * 36500);

class Deadline {
 public:
  using Clock = std::chrono::steady_clock;

  static Deadline after(std::chrono::milliseconds timeout) {
    return Deadline(Clock::now() + std::clamp(timeout, -kLongestTimeout, kLongestTimeout));
  }

  /// The time of the system's last tick, some milliseconds ago: cheaper than Clock::now().
  static Clock::time_point last_tick() {
    timespec at{};
    ::clock_gettime(CLOCK_MONOTONIC_COARSE, &at);
    return Clock::time_point(std::chrono::seconds(at.tv_sec) + std::chrono::nanoseconds(at.tv_nsec));
  }

  bool passed() const { return Clock::now() >= at_; }
  std::chrono::milliseconds left() const {
    const auto now = Clock::now();
    if (now >= at_) return std::chrono::milliseconds(0);
    return std::chrono::duration_cast<std::chrono::milliseconds>(at_ - now) + std::chrono::milliseconds(1);
  }

 private:
  explicit Deadline(Clock::time_point at) : at_(at) {}
  Clock::time_point at_;
};

}  // namespace ringlet
