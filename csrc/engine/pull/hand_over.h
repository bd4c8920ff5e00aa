// Whether a rank writes what its peers read next past its caches.
//
// A store to a line that another core has read waits until that core has given the line up. Between distant cores of an
// AMD Zen 4 such stores hardly overlap, and are many times slower than the peer's reads. A store past the caches does not
// wait, but the reader fetches the line from memory, which is slower than from a near core's cache. Which way is better
// depends on where the ranks run, and a virtual machine's processors move. So a rank times some of its copies into
// staging buffers. Once they are slow, it writes past the caches, and now and then it tries whether they still are. Each
// rank decides for itself; the bits are the same (docs/decisions/0058-slow-stores-go-past-the-cache.md).
// Thread safety: one thread at a time.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>

#include "engine/tuning.h"
#include "reduce/reduce.h"

namespace ringlet {

class HandOver {
 public:
  using Clock = std::chrono::steady_clock;

  explicit HandOver(const Tuning& tuning)
      : least_bytes_(tuning.timed_copy_bytes), fast_(tuning.fast_copy_bytes_per_us) {}

  /// Copies what a peer reads next.
  void copy(std::byte* to, const std::byte* from, size_t bytes) {
    const bool timed = times(bytes);
    const auto began = timed ? Clock::now() : Clock::time_point{};
    copy_bytes(to, from, bytes, past_cache(bytes) ? NextReader::nobody : NextReader::peer);
    if (timed) took(bytes, Clock::now() - began);
  }

  bool past_cache(size_t bytes) const { return past_cache_ && bytes >= least_bytes_; }

  /// Whether the next copy of so many bytes is to be timed. Such a copy goes into the cache.
  bool times(size_t bytes) {
    if (bytes < least_bytes_) return false;
    if (!past_cache_) return slow_ > 0 || ++copies_ % kOneOf == 0;
    if (--until_trial_ > 0) return false;
    past_cache_ = false;  // for one copy
    return true;
  }

  /// A copy that was to be timed took so long.
  void took(size_t bytes, Clock::duration time) {
    const double microseconds = std::chrono::duration<double, std::micro>(time).count();
    const bool slow = microseconds * static_cast<double>(fast_) > static_cast<double>(bytes);
    const bool trial = slow_ == kSlowInARow;
    if (!slow) {
      slow_ = 0;
    } else if (trial) {
      pause_ = std::min(2 * pause_, kMostPause);
    } else if (++slow_ == kSlowInARow) {
      pause_ = kLeastPause;
    }
    past_cache_ = slow_ == kSlowInARow;
    until_trial_ = pause_;
  }

 private:
  static constexpr int kSlowInARow = 4;  // one alone may be an interrupt's or a page fault's fault
  static constexpr unsigned kOneOf = 8;
  static constexpr int kLeastPause = 16, kMostPause = 1024;  // copies between two trials

  const size_t least_bytes_, fast_;  // bytes, and bytes a microsecond
  bool past_cache_ = false;
  int slow_ = 0;  // in a row
  unsigned copies_ = 0;
  int pause_ = kLeastPause, until_trial_ = 0;
};

}  // namespace ringlet
