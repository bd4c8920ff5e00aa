// Whether two ranks read a call in place or stage it: the times of the calls are the test's.
#include "engine/pull/place_trials.h"

#include "check.h"

using namespace ringlet;
using namespace std::chrono_literals;

namespace {

constexpr size_t kBytes = size_t{1} << 20;
constexpr auto kReduce = Collective::all_reduce;

/// As many calls as one period has, on one rank, which take so long. Returns how many were staged.
unsigned period(PlaceTrials& trials, PlaceTrials::Clock::duration in_place, PlaceTrials::Clock::duration staged,
                size_t bytes = kBytes, Collective collective = kReduce) {
  unsigned count = 0;
  for (unsigned i = 0; i < PlaceTrials::kPeriod; ++i) {
    const bool stages = trials.stages(collective, bytes);
    CHECK_EQ(trials.trying(), i < 2 * PlaceTrials::kTrials);
    if (trials.trying()) trials.took(!stages, stages ? staged : in_place);
    count += stages;
  }
  return count;
}

constexpr unsigned kTrials = PlaceTrials::kTrials, kRest = PlaceTrials::kPeriod - PlaceTrials::kTrials;

void the_quicker_way_is_taken() {
  PlaceTrials trials;
  CHECK_EQ(period(trials, 50us, 60us), kTrials);
  CHECK_EQ(period(trials, 60us, 50us), kRest);
  CHECK_EQ(period(trials, 60us, 50us), kRest);
  CHECK_EQ(period(trials, 50us, 60us), kTrials);
}

void one_quick_call_is_enough() {
  PlaceTrials trials;
  for (unsigned i = 0; i < PlaceTrials::kPeriod; ++i) {
    const bool stages = trials.stages(kReduce, kBytes);
    if (trials.trying()) trials.took(!stages, stages && i % kTrials != 1 ? 900us : stages ? 50us : 60us);
    if (!trials.trying()) CHECK(stages);
  }
}

void sizes_and_collectives_are_apart() {
  PlaceTrials trials;
  CHECK_EQ(period(trials, 60us, 50us), kRest);
  CHECK_EQ(period(trials, 50us, 60us, 4 * kBytes), kTrials);
  CHECK_EQ(period(trials, 50us, 60us, kBytes, Collective::all_gather), kTrials);
  CHECK_EQ(period(trials, 60us, 50us), kRest);
  CHECK_EQ(period(trials, 60us, 50us, 1), kRest);
  CHECK_EQ(period(trials, 60us, 50us, size_t{1} << 40), kRest);
}

void calls_of_one_class_are_compared_by_the_byte() {
  PlaceTrials trials;
  for (unsigned i = 0; i < PlaceTrials::kPeriod; ++i) {
    const size_t bytes = kBytes + (i < kTrials ? kBytes / 2 : 0);
    const bool stages = trials.stages(kReduce, bytes);
    if (trials.trying()) trials.took(!stages, stages ? 50us : 60us);
    if (!trials.trying()) CHECK(!stages);  // 60 us for more bytes
  }
}

void a_tensor_that_cannot_be_read_in_place_decides_nothing() {
  PlaceTrials trials;
  for (unsigned i = 0; i < PlaceTrials::kPeriod; ++i) {
    const bool stages = trials.stages(kReduce, kBytes);
    if (trials.trying()) trials.took(/*in_place=*/false, 50us);
    if (!trials.trying()) CHECK(!stages);
  }
}

}  // namespace

int main() {
  the_quicker_way_is_taken();
  one_quick_call_is_enough();
  sizes_and_collectives_are_apart();
  calls_of_one_class_are_compared_by_the_byte();
  a_tensor_that_cannot_be_read_in_place_decides_nothing();
  return check_result("place_trials");
}
