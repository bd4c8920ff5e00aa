// The last calls of a group, which every Timeout and PeerLost names; and the log events of calls (base/log.h).
//
// Contract: a call costs some stores here, and no allocation, lock or clock. Times are measured if RINGLET_LOG is info
// or debug. Thread safety: one thread at a time makes calls; any thread reads. A reader may miss the newest calls, and
// never sees one that is half written.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "base/log.h"
#include "engine/call.h"
#include "engine/selector.h"

namespace ringlet {

/// One of the last calls.
struct PastCall {
  Call call;                          ///< without memory and timeout; `algorithm` as the caller named it
  const Algorithm* chosen = nullptr;  ///< what ran; null: the call ended before the choice
  bool in_place = false;
  bool done = false;
  uint64_t segments = 0;
  double seconds = 0;  ///< 0: not measured
};

/// How the engine carries out a call.
struct Choice {
  const Algorithm* algorithm;
  const char* memory;  ///< "in place", "staged" or "in messages"
  size_t segments;
  size_t bytes;          ///< of the schedule's whole buffer
  size_t segment_bytes;  ///< of the same, in one segment
};

class CallLog {
 public:
  static constexpr size_t kKept = 16;

  /// Before the first call.
  void set_source(LogSource source) { source_ = std::move(source); }
  const LogSource& source() const { return source_; }

  /// A call without an end() stays unfinished.
  void begin(const CallSignature& call, uint64_t sequence) {
    const uint64_t at = made_.load(std::memory_order_relaxed);
    current_ = &records_[at % kRecords];
    // Release: a reader that sees one of these also sees how many calls were made before.
    current_->signature.store(call.signature, std::memory_order_release);
    current_->count.store(call.count, std::memory_order_release);
    current_->sequence.store(sequence, std::memory_order_release);
    current_->progress.store(0, std::memory_order_release);
    made_.store(at + 1, std::memory_order_release);
    if (logging(LogLevel::info)) [[unlikely]]
      tell_begin();
  }

  void chosen(const Algorithm& algorithm, bool in_place, size_t segments) noexcept {
    current_->chosen.store(&algorithm, std::memory_order_release);
    current_->progress.store(segments << kSegments | (in_place ? kInPlace : 0), std::memory_order_release);
  }

  void end() {
    const uint64_t progress = current_->progress.load(std::memory_order_relaxed);
    current_->progress.store(progress | kDone, std::memory_order_release);
    if (logging(LogLevel::info)) [[unlikely]]
      tell_end();
  }

  /// Whether a listener wants to know the choice.
  static bool wants_choice(const Call& call) noexcept { return call.observer != nullptr || logging(LogLevel::info); }
  /// Tells the observer the choice, and logs it if it is the first of its collective and size (in powers of two).
  void tell(const Call& call, const Choice& choice, const Selector& selector, const Situation& situation);
  /// Notes a wait in a call. peer: -1 for several.
  void waited(int peer, std::chrono::steady_clock::duration time);
  /// Logs the error that poisons the group.
  void failed(ErrorKind kind, const std::string& message) const noexcept;

  /// The oldest first.
  std::vector<PastCall> calls() const;
  /// For a Timeout or PeerLost: `message` and the last calls. For any other kind: `message`.
  std::string with_last_calls(ErrorKind kind, const std::string& message) const;
  uint64_t made() const { return made_.load(std::memory_order_acquire); }
  double waited_seconds() const { return static_cast<double>(waited_.load(std::memory_order_relaxed)) * 1e-9; }

 private:
  // More than calls() gives: the next call may overwrite the oldest while a thread reads.
  static constexpr size_t kRecords = 2 * kKept;
  static constexpr uint64_t kDone = 1, kInPlace = 2;
  static constexpr int kSegments = 2;  // from that bit on

  struct alignas(64) Record {
    std::atomic<uint64_t> signature{0}, count{0}, sequence{0};
    std::atomic<uint64_t> progress{0};  // segments << kSegments, and bits; 0: nothing is chosen yet
    std::atomic<const Algorithm*> chosen{nullptr};
    // Nanoseconds; `began` is of the steady clock. They belong to the call for which `timed` is made_ after its begin:
    // each call asks anew whether the log is on.
    std::atomic<uint64_t> timed{0};
    std::atomic<int64_t> began{0}, took{0};
  };

  void tell_begin();
  void tell_end();
  PastCall read(uint64_t at) const noexcept;

  LogSource source_;
  std::array<Record, kRecords> records_;
  Record* current_ = records_.data();  // of the thread that makes calls
  std::atomic<uint64_t> made_{0};
  std::atomic<int64_t> waited_{0};
  std::array<uint64_t, kCollectives> told_{};  // by collective: a bit for each logged size, in powers of two
};

}  // namespace ringlet
