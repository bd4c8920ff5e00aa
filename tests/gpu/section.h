// What the parts of gpu_check share: their names, how a result is printed, and how a failure is counted without ending
// what comes after it.
//
// Contract: tell() prints "name<TAB>figure<TAB>unit" at once. A Section counts cases; what throws in one is a failed
// case. Failures go to check.h and to stderr, five of a section at most, so that those of one do not hide another's.
// Where `device_hangs` is set the device does something that does not end: what would wait for it is left out, memory
// is kept, and the process ends without destructors.
// Thread safety: one thread at a time; `device_hangs` from any.
#pragma once

#include <atomic>
#include <chrono>
#include <climits>
#include <cstdio>
#include <exception>
#include <string>
#include <utility>

#include "check.h"

namespace gpu_check {

struct Options {
  bool few = false;       ///< for a sanitizer or a device that is none: less of everything, and more time for it
  bool together = false;  ///< all ranks' pull kernels are one launch
};

void smoke(const Options& options);
void kernels(const Options& options);
void bandwidth(const Options& options);
void pull(const Options& options);
void pull_speed(const Options& options);
void nccl(const Options& options);
void nccl_speed(const Options& options);

inline std::atomic<bool> device_hangs{false};

inline void tell(const std::string& name, double figure, const std::string& unit) {
  std::printf("%s\t%.6g\t%s\n", name.c_str(), figure, unit.c_str());
  std::fflush(stdout);
}

/// A line that is no figure.
inline void say(const std::string& line) {
  std::printf("%s\n", line.c_str());
  std::fflush(stdout);
}

class Section {
 public:
  using Clock = std::chrono::steady_clock;

  /// With how many failures, or so much time lost with them, the remaining cases are not run.
  struct Patience {
    int failures = INT_MAX;
    Clock::duration lost = Clock::duration::max();
  };
  explicit Section(std::string name) : Section(std::move(name), Patience{}) {}
  Section(std::string name, const Patience& patience) : name_(std::move(name)), patience_(patience) {}

  /// One case: `wrong` is empty where it was right.
  void report(const std::string& case_name, const std::string& wrong) {
    ++cases_;
    if (wrong.empty()) return;
    ++failures_;
    ++check_failures;
    if (failures_ > kShown) return;
    std::fprintf(stderr, "%s: failed: %s: %s\n", name_.c_str(), case_name.c_str(), wrong.c_str());
    if (failures_ == kShown) std::fprintf(stderr, "%s: further failures are only counted\n", name_.c_str());
    std::fflush(stderr);
  }

  /// `act` returns what was wrong. False where it threw.
  template <class Act>
  bool attempt(const std::string& case_name, Act act) {
    const auto start = Clock::now();
    std::string wrong;
    bool threw = false;
    try {
      wrong = act();
    } catch (const std::exception& error) {
      wrong = error.what();
      threw = true;
    }
    report(case_name, wrong);
    if (!wrong.empty()) lost_ += Clock::now() - start;
    if (threw) ++thrown_;
    return !threw;
  }

  /// Where nothing is to be expected any more: this section's remaining cases are not run.
  bool hopeless() const {
    return thrown_ >= kMostThrown || failures_ >= patience_.failures || lost_ >= patience_.lost || device_hangs;
  }
  int failures() const { return failures_; }

  /// A part's cases are this section's, too.
  void add(const Section& part) {
    cases_ += part.cases_;
    failures_ += part.failures_;
  }

  /// The section's last line.
  void conclude() const {
    if (hopeless()) say(name_ + ": given up after " + std::to_string(failures_) + " failures; the rest was not run");
    tell(name_ + ": cases", cases_, "of which " + std::to_string(failures_) + " failed");
  }

 private:
  static constexpr int kShown = 5, kMostThrown = 5;

  const std::string name_;
  const Patience patience_;
  int cases_ = 0, failures_ = 0, thrown_ = 0;
  Clock::duration lost_{0};
};

/// Of a world of ranks, which waits for as long as its calls' timeout where one of them does not come.
inline constexpr Section::Patience kWorld{5, std::chrono::seconds(10)};

/// What a device that hangs would not give back is kept.
template <class Owner>
void drop(Owner& owner) {
  if (device_hangs) {
    static_cast<void>(owner.release());
  } else {
    owner.reset();
  }
}

/// An act that reports by throwing alone.
template <class Act>
void attempt(const std::string& name, Act act) {
  Section section(name);
  section.attempt(name, [&] {
    act();
    return std::string();
  });
}

}  // namespace gpu_check
