// What two ranks try for their longer calls: whether to read the tensors in place or to stage them, and which algorithm.
//
// In place fewer bytes move, but each rank writes to lines that the other has read: quick if the tensors are in the caches
// and the cores are near. If not, staging buffers are quicker: they stay in the caches, or are written past them. Staged,
// one_shot waits for the peer once and adds twice, two_shot waits twice and adds once. So there is a trial of each
// collective, about one size, and what the ranks' tensors allow. Both ranks make the same calls, so they try at the same
// calls. There they first meet, and the slower rank's times count.
//
// The sum of two values has the same bits each way. More than two ranks, or ranks that share a processor, try nothing. A
// given rule or algorithm is kept; then only the place is tried (docs/decisions/0067-one-trial.md).
// Thread safety: one thread at a time.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>

#include "base/trial.h"
#include "engine/authored.h"
#include "engine/selector.h"

namespace ringlet {

/// The trials of like calls: of those that can be read in place, and of the others.
struct CallTrials {
  static constexpr int kInPlace = 0, kStaged = 1;

  /// As `chosen` is for the call itself, unless the trial says otherwise.
  struct Way {
    bool in_place;
    bool other_algorithm;
  };
  Way way(bool readable) const {
    const int taken = trials[readable ? kInPlace : kStaged].way() + (readable ? 0 : 1);
    return {taken == 0, taken == 2};
  }

  std::array<Trial, 2> trials;
};

class AllCallTrials {
 public:
  static constexpr size_t kLeastBytes = size_t{128} << 10;  // below, a trial costs more than it finds

  explicit AllCallTrials(const Selector& selector) {
    const bool both = !selector.has_given(Collective::all_reduce);
    for (int collective = 0; collective < kCollectives; ++collective) {
      for (const bool named : {false, true}) {
        const bool tries = both && !named && collective == static_cast<int>(Collective::all_reduce);
        for (CallTrials& like : all_[static_cast<size_t>(collective)][named]) {
          like.trials = {Trial(tries ? 3 : 2, kTerms), Trial(tries ? 2 : 1, kTerms)};
        }
      }
    }
  }

  /// bytes: at least kLeastBytes. `named`: the caller has chosen the algorithm.
  CallTrials& of(Collective collective, size_t bytes, bool named) {
    const int size = std::min(static_cast<int>(std::bit_width(bytes)) - kLeastWidth, kSizes - 1);
    return all_[static_cast<size_t>(collective)][named][static_cast<size_t>(size)];
  }

  static const Algorithm& other(const Algorithm& algorithm) {
    static const Algorithm* const one_shot = find_any_algorithm(Collective::all_reduce, "one_shot");
    static const Algorithm* const two_shot = find_any_algorithm(Collective::all_reduce, "two_shot");
    return &algorithm == one_shot ? *two_shot : *one_shot;
  }

 private:
  static constexpr int kLeastWidth = 18, kSizes = 6;  // from 128 KiB, 256 KiB, ... 4 MiB on
  // Staging buffers follow each other through a large area, and only some calls after a change of way all of it is as
  // that way leaves it.
  static constexpr Trial::Terms kTerms{
      .samples = 4, .settling = 6, .least_pause = 64, .most_pause = 2048, .clearly = 0.95F};

  std::array<std::array<std::array<CallTrials, kSizes>, 2>, kCollectives> all_;
};

}  // namespace ringlet
