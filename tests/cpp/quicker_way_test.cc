// Which way copies go: their times are the test's.
#include "engine/quicker_way.h"

#include "check.h"

using namespace ringlet;

namespace {

constexpr size_t kBytes = size_t{64} << 10;

/// Copies which take so many nanoseconds a KiB through the cache, and past it. Returns how many went past it.
int copies(QuickerWay& way, int count, int through, int past) {
  int past_cache = 0;
  for (int i = 0; i < count; ++i) {
    const size_t bytes = kBytes >> i % 3;  // a time is one of so many bytes
    const bool timed = way.times();
    past_cache += way.past_cache();
    const int interrupted = i % 3 == 0 ? 20'000 : 0;
    const auto nanoseconds = static_cast<long>(bytes / 1024) * (way.past_cache() ? past : through) + interrupted;
    if (timed) way.took(bytes, std::chrono::nanoseconds(nanoseconds));
  }
  return past_cache;
}

void the_quicker_way_is_kept() {
  QuickerWay way;
  CHECK(!way.past_cache());
  const int tried = copies(way, 100'000, 50, 90);
  CHECK(tried > 0 && tried < 100'000 / 20);
  CHECK(copies(way, 10'000, 400, 90) > 10'000 - 2'500);
  const int back = 100'000 - copies(way, 100'000, 400, 90);
  CHECK(back > 0 && back < 100'000 / 20);
  CHECK(copies(way, 10'000, 50, 90) < 2'500);
}

void a_way_that_is_hardly_quicker_changes_nothing() {
  QuickerWay way;
  CHECK(copies(way, 100'000, 100, 95) < 100'000 / 20);
}

void a_change_is_seen_soon_after_a_change() {
  QuickerWay way;
  CHECK(copies(way, 120, 400, 90) > 0);  // the first trial comes after 64 copies
  CHECK(copies(way, 200, 400, 90) > 0);
  CHECK(way.past_cache());
  copies(way, 200, 50, 90);
  CHECK(!way.past_cache());
}

/// Nobody asks while a copy is being timed; the way stays as it was at that copy.
void a_copy_may_take_long_to_be_timed() {
  QuickerWay way;
  for (int i = 0; i < 1000; ++i) {
    if (!way.times()) continue;
    const bool past = way.past_cache();
    for (int others = 0; others < 10; ++others) CHECK_EQ(way.past_cache(), past);
    way.took(kBytes, std::chrono::nanoseconds(past ? 4'000 : 3'000));
  }
  CHECK(!way.past_cache());
}

}  // namespace

int main() {
  the_quicker_way_is_kept();
  a_way_that_is_hardly_quicker_changes_nothing();
  a_change_is_seen_soon_after_a_change();
  a_copy_may_take_long_to_be_timed();
  return check_result("quicker_way");
}
