// When a rank writes past its caches: the times of its copies are the test's.
#include "engine/pull/hand_over.h"

#include <cstring>

#include "check.h"

using namespace ringlet;
using namespace std::chrono_literals;

namespace {

constexpr size_t kBytes = size_t{64} << 10;
constexpr auto kFast = 8us, kSlow = 40us;

/// Copies until one is timed, which takes so long. Returns the number of copies.
int copy_until_timed(HandOver& hand_over, HandOver::Clock::duration time) {
  for (int copies = 1; copies <= 2000; ++copies) {
    if (!hand_over.times(kBytes)) continue;
    CHECK(!hand_over.past_cache(kBytes));
    hand_over.took(kBytes, time);
    return copies;
  }
  return -1;
}

void fast_copies_stay_in_the_cache() {
  HandOver hand_over{Tuning{}};
  for (int i = 0; i < 100; ++i) {
    CHECK_EQ(copy_until_timed(hand_over, kFast), 8);
    CHECK(!hand_over.past_cache(kBytes));
  }
}

void a_few_slow_copies_change_nothing() {
  HandOver hand_over{Tuning{}};
  for (int i = 0; i < 100; ++i) {
    copy_until_timed(hand_over, i % 4 == 3 ? kFast : kSlow);
    CHECK(!hand_over.past_cache(kBytes));
  }
}

void slow_copies_go_past_the_cache_and_are_tried_again() {
  HandOver hand_over{Tuning{}};
  for (int i = 0; i < 4; ++i) copy_until_timed(hand_over, kSlow);
  CHECK(hand_over.past_cache(kBytes));
  CHECK(!hand_over.past_cache(Tuning::kTimedCopyBytes - 1));
  for (const int pause : {16, 32, 64, 128, 256, 512, 1024, 1024}) {
    CHECK_EQ(copy_until_timed(hand_over, kSlow), pause);
    CHECK(hand_over.past_cache(kBytes));
  }
  CHECK_EQ(copy_until_timed(hand_over, kFast), 1024);
  CHECK(!hand_over.past_cache(kBytes));
  CHECK_EQ(copy_until_timed(hand_over, kFast), 8);
}

void short_copies_are_not_timed() {
  HandOver hand_over{Tuning{}};
  for (int i = 0; i < 100; ++i) CHECK(!hand_over.times(Tuning::kTimedCopyBytes - 1));
}

void a_table_says_what_is_slow() {
  Tuning tuning;
  tuning.fast_copy_bytes_per_us = 1 << 10;
  HandOver never(tuning);
  for (int i = 0; i < 100; ++i) copy_until_timed(never, kSlow);
  CHECK(!never.past_cache(kBytes));
  tuning.fast_copy_bytes_per_us = size_t{1} << 40;
  HandOver always(tuning);
  for (int i = 0; i < 4; ++i) copy_until_timed(always, kFast);
  CHECK(always.past_cache(kBytes));
}

void bytes_are_copied_both_ways() {
  Tuning tuning;
  tuning.fast_copy_bytes_per_us = size_t{1} << 40;
  HandOver hand_over(tuning);
  alignas(64) static std::byte from[kBytes], to[kBytes];
  for (int copies = 0, past = 0; past < 100; ++copies) {
    past += hand_over.past_cache(kBytes);
    for (size_t i = 0; i < kBytes; ++i) from[i] = static_cast<std::byte>(i * 7 + static_cast<size_t>(copies));
    hand_over.copy(to, from, kBytes);
    CHECK(std::memcmp(to, from, kBytes) == 0);
  }
}

}  // namespace

int main() {
  fast_copies_stay_in_the_cache();
  a_few_slow_copies_change_nothing();
  slow_copies_go_past_the_cache_and_are_tried_again();
  short_copies_are_not_timed();
  a_table_says_what_is_slow();
  bytes_are_copied_both_ways();
  return check_result("hand_over");
}
