// Whether two ranks read the tensors of a call in place, or through staging buffers.
//
// Neither is right for a size or a processor. In place fewer bytes move, but each rank reads what the other has just
// written, and writes to lines that the other has read. That is quick if the tensors are in the caches and the ranks'
// cores are near. If the tensors come from memory, as gradients do, or the cores are far apart, staging buffers are
// quicker: they stay in the caches, or are written past them (hand_over.h). Cores of a virtual machine move, and a
// program's tensors may be either. So of each kPeriod calls of a collective and about one size, the first few go both
// ways and are timed. The others go the way that had the quickest call. A call is staged if either rank wants it. So,
// unlike a QuickerWay, both ranks must try at the same calls: when depends on nothing but the calls, which both make.
// The sum of two values has the same bits in either way (docs/decisions/0064-two-ranks-try-both-places.md).
// Thread safety: one thread at a time.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <chrono>
#include <cstddef>
#include <limits>

#include "schedule/collective.h"

namespace ringlet {

class PlaceTrials {
 public:
  using Clock = std::chrono::steady_clock;

  /// Whether this rank wants the next call, of so many bytes, to be staged.
  bool stages(Collective collective, size_t bytes) {
    const int size = std::clamp(static_cast<int>(std::bit_width(bytes)) - kLeastWidth, 0, kSizes - 1);
    calls_ = &all_[static_cast<size_t>(collective)][static_cast<size_t>(size)];
    bytes_ = bytes;
    const unsigned place = calls_->made++ % kPeriod;
    if (place == 0) calls_->in_place = calls_->staged = kNever;
    if (place == 2 * kTrials) decide(*calls_);
    trying_ = place < 2 * kTrials;
    return trying_ ? place >= kTrials : calls_->stage;
  }

  /// Whether that call is to be timed.
  bool trying() const { return trying_; }

  /// It took so long, from when both ranks were there.
  void took(bool in_place, Clock::duration time) {
    const double a_byte = std::chrono::duration<double>(time).count() / static_cast<double>(bytes_);
    double& least = in_place ? calls_->in_place : calls_->staged;
    least = std::min(least, a_byte);
  }

  // Of each way. The quickest counts, because others may have been disturbed, or found their buffers in no cache.
  static constexpr unsigned kTrials = 8;
  static constexpr unsigned kPeriod = 256;  // 3 % of the time, if the other way takes twice as long

 private:
  static constexpr int kLeastWidth = 17, kSizes = 8;  // up to 64 KiB, 128 KiB, ... 4 MiB, and more
  static constexpr double kNever = std::numeric_limits<double>::infinity();

  struct Calls {
    unsigned made = 0;
    double in_place = kNever, staged = kNever;  // seconds a byte of the quickest trial
    bool stage = false;
  };

  /// Without a trial in place, because one of the tensors was not registered, all stays as it is.
  static void decide(Calls& calls) {
    if (calls.in_place != kNever && calls.staged != kNever) calls.stage = calls.staged < calls.in_place;
  }

  std::array<std::array<Calls, kSizes>, kCollectives> all_{};
  Calls* calls_ = nullptr;  // of the call in progress
  size_t bytes_ = 0;
  bool trying_ = false;
};

}  // namespace ringlet
