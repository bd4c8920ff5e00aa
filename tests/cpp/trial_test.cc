// Which way is taken after which times: the times are the test's.
#include "base/trial.h"

#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <array>
#include <vector>

#include "check.h"
#include "engine/pull/staging_trials.h"
#include "ranks.h"

using namespace ringlet;

/// In this thread, how far the clock jumps at each look, and how far it is ahead by now.
static thread_local long jump_ns = 0, ahead_ns = 0;

extern "C" __attribute__((visibility("default"))) int clock_gettime(clockid_t clock, timespec* time) noexcept {
  const auto result = static_cast<int>(::syscall(SYS_clock_gettime, clock, time));
  const long ns = time->tv_nsec + (ahead_ns += jump_ns);
  time->tv_sec += ns / 1'000'000'000;
  time->tv_nsec = ns % 1'000'000'000;
  return result;
}

namespace {

constexpr Trial::Terms kTerms{.samples = 4, .settling = 3, .least_pause = 16, .most_pause = 900, .clearly = 0.9F};
constexpr unsigned kOfTwo = 2 * 2 * (3 + 4), kOfThree = 2 * 3 * (3 + 4);  // uses of two trials

/// So many uses, which cost so much by their way. Returns how many went that way.
int uses(Trial& trial, int count, Trial::Costs costs, int way) {
  int found = 0;
  for (int i = 0; i < count; ++i) {
    const bool timed = trial.times();
    found += trial.way() == way;
    const float interrupted = i % 3 == 0 ? 7 : 0;
    if (timed) trial.took(costs[static_cast<size_t>(trial.way())] + interrupted);
  }
  return found;
}

TEST(the_quickest_way_is_kept) {
  for (const int quickest : {1, 2, 0}) {
    Trial trial(3, kTerms);
    Trial::Costs costs{5, 5, 5};
    costs[static_cast<size_t>(quickest)] = 2;
    uses(trial, 16 + kOfThree, costs, quickest);
    CHECK(!trial.times());
    CHECK_EQ(trial.way(), quickest);
    CHECK(uses(trial, 10'000, costs, quickest) > 10'000 - 10'000 / 4);
  }
}

TEST(a_trial_takes_the_ways_in_turn) {
  Trial trial(3, kTerms);
  for (int use = 0; use < 16; ++use) CHECK(!trial.times() && trial.way() == 0);
  for (const int way : {0, 1, 2, 0, 1, 2}) {
    for (int use = 0; use < 7; ++use) {
      CHECK(trial.is_trying_next());
      CHECK_EQ(trial.is_due(), way == 0 && use == 0 && trial.costs()[2] == 5);  // the first of the two trials
      CHECK_EQ(trial.times(), use >= 3);                                        // the first three settle
      CHECK_EQ(trial.way(), way);
      if (use >= 3) trial.took(5);
    }
  }
  CHECK(trial.is_due() && trial.is_trying_next());
  CHECK(!trial.times() && !trial.is_due() && !trial.is_trying_next());
}

/// 2 % of the time: twice seven uses at twice the cost, in 700.
TEST(trials_cost_little) {
  struct Costs {
    Trial::Costs of;
    int pause;
  };
  for (const Costs& costs :
       {Costs{{5, 5, 5}, 16}, Costs{{5, 10, 5}, 700}, Costs{{5, 7.5F, 6.25F}, 525}, Costs{{5, 100, 5}, 900}}) {
    Trial trial(3, kTerms);
    uses(trial, 16 + kOfThree, costs.of, 0);
    for (int use = 0; use < costs.pause - 1; ++use) CHECK(!trial.times() && !trial.is_trying_next());
    CHECK(!trial.times() && trial.is_trying_next());
    for (unsigned use = 0; use <= kTerms.settling; ++use) CHECK_EQ(trial.times(), use == kTerms.settling);
  }
}

TEST(a_clock_that_stands_still_does_no_harm) {
  Trial trial(2, kTerms);
  for (int use = 0; use < 1000; ++use) {
    if (trial.times()) trial.took(0);
  }
  CHECK(uses(trial, 1000, {5, 2}, 1) > 500);
}

TEST(a_way_that_is_hardly_quicker_changes_nothing) {
  Trial trial(2, kTerms);
  for (const int pause : {16, 16, 16}) {
    CHECK_EQ(uses(trial, pause, {5, 4.6F}, 0), pause);
    uses(trial, kOfTwo, {5, 4.6F}, 0);
  }
}

/// Of two trials in a row; the ways of all trials are in turn, whatever the trials before have found.
TEST(one_odd_trial_changes_nothing) {
  for (const int odd : {0, 1, 2}) {
    Trial trial(3, {.samples = 4, .settling = 2, .least_pause = 50, .most_pause = 50, .clearly = 0.9F});
    const Trial::Costs good{5, 8, 8}, bad{5, 4, 2};
    CHECK_EQ(uses(trial, 50, good, 0), 50);
    CHECK_EQ(uses(trial, 18, odd == 0 ? bad : good, 0), 6);
    CHECK_EQ(uses(trial, 18, odd == 1 ? bad : good, 0), 6);
    CHECK_EQ(uses(trial, 50, good, 0), 50);
    CHECK_EQ(uses(trial, 18, odd == 2 ? bad : good, 0), 6);
    CHECK_EQ(uses(trial, 18, {5, 2, 8}, 0), 6);  // the first of these two found way 2, if any
    CHECK_EQ(uses(trial, 50, good, 0), 50);
    uses(trial, 36, bad, 0);
    CHECK_EQ(uses(trial, 50, good, 2), 50);
  }
}

TEST(the_first_trial_may_come_early) {
  Trial trial(2, {.samples = 4, .settling = 2, .least_pause = 500, .most_pause = 500, .clearly = 1, .first_pause = 20});
  CHECK_EQ(uses(trial, 20 + 6, {5, 4}, 1), 0);
  CHECK_EQ(uses(trial, 6 + 12, {5, 4}, 1), 6 + 6);
  CHECK_EQ(uses(trial, 500, {5, 4}, 1), 500);  // way 1 is in use; all pauses are of one length
  CHECK_EQ(uses(trial, 6 + 6, {5, 4}, 0), 6);
}

/// What a way costs one rank may depend on the other's way.
TEST(ranks_that_keep_different_ways_try_the_same) {
  const Trial::Terms terms{.samples = 4, .settling = 2, .least_pause = 50, .most_pause = 50, .clearly = 1};
  Trial one(2, terms), other(2, terms);
  const auto alone = [](const Trial& trial, int quicker) { return trial.way() == quicker ? 1.0 : 2.0; };
  for (int use = 0; use < 50 + 24; ++use) {
    if (one.times()) one.took(alone(one, 0));
    if (other.times()) other.took(alone(other, 1));
  }
  const auto beside = [&](const Trial& trial, const Trial& peer) {
    return trial.way() == 0 && peer.way() == 0 ? 1.0 : trial.way() == peer.way() ? 2.0 : 3.0;
  };
  for (int use = 0; use < 50 + 24; ++use) {
    const bool timed = one.times();
    CHECK_EQ(other.times(), timed);
    if (use < 50) CHECK(one.way() == 0 && other.way() == 1);
    if (timed) CHECK_EQ(one.way(), other.way());
    if (timed) one.took(beside(one, other));
    if (timed) other.took(beside(other, one));
  }
  one.times();
  other.times();
  CHECK(one.way() == 0 && other.way() == 0);
}

TEST(ranks_decide_alike) {
  Trial one(2, kTerms), other(2, kTerms);
  int together = 0;
  for (int use = 0; use < 10'000; ++use) {
    CHECK_EQ(one.is_due(), other.is_due());
    if (one.is_due()) {
      Trial::Costs worst = one.costs();
      for (size_t way = 0; way < worst.size(); ++way) worst[way] = std::max(worst[way], other.costs()[way]);
      one.decide(worst);
      other.decide(worst);
    }
    const bool timed = one.times();
    CHECK_EQ(other.times(), timed);
    CHECK_EQ(one.way(), other.way());
    if (timed) one.took(one.way() == 0 ? 5 : 2);    // way 1 is quicker for one,
    if (timed) other.took(one.way() == 0 ? 5 : 6);  // but not for the slower one
    together += one.way() == 1;
  }
  CHECK(together < 10'000 / 4);
}

/// Of one_shot and two_shot one is slow for one rank, and the other for the other rank.
TEST(ranks_decide_by_each_others_times) {
  constexpr size_t kCount = size_t{256} << 8;
  constexpr int kCalls = 200, kFirst = 64, kOneWay = 10, kTrial = 20, kBoth = 40;  // AllCallTrials::kTerms
  std::array<std::vector<const Algorithm*>, 2> ran;
  run_well(
      2, Between::stages,
      [&](Communicator& group) {
        Floats data(kCount);
        for (int call = 0; call < kCalls; ++call) {
          const int use = call - kFirst;
          const bool first = use % kTrial < kOneWay;
          jump_ns = use >= 0 && use < kBoth && first == (group.rank() == 0) ? 5'000'000 : 0;
          data.values.assign(kCount, static_cast<float>(group.rank() + call));
          group.run(data.sum());
          CHECK(data.values == std::vector<float>(kCount, static_cast<float>(2 * call + 1)));
          ran[static_cast<size_t>(group.rank())].push_back(group.calls().calls().back().chosen);
        }
        jump_ns = 0;
      },
      std::chrono::seconds(5));
  CHECK(ran[0] == ran[1]);
}

/// Calls of every size have a trial, those of nothing and the largest, too: a table may say from which size on.
TEST(staging_is_tried_for_every_size) {
  for (const size_t bytes : {size_t{0}, size_t{1}, size_t{1} << 40}) {
    StagingTrials trials;
    int past = 0;
    for (int call = 0; call < 1000; ++call) {
      trials.begin(bytes, true);
      past += trials.go_past();
      trials.end();
    }
    CHECK(past > 0 && past < 1000);
  }
}

TEST(uses_that_were_not_timed_change_nothing) {
  Trial trial(2, kTerms);
  for (int trials = 0; trials < 3; ++trials) {
    for (int use = 0; use < 16; ++use) CHECK(!trial.times() && trial.way() == 0);
    for (unsigned use = 0; use < kOfTwo; ++use) trial.times();
  }
  Trial alone;
  for (int use = 0; use < 1000; ++use) CHECK(!alone.times() && alone.way() == 0 && !alone.is_trying_next());
}

}  // namespace
