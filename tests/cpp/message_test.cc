// The message engine: the contract over TCP, calls that do not match, and ranks that go or do not come.
#include <sys/resource.h>

#include <barrier>

#include "contract.h"

using namespace ringlet;

namespace {

TEST_REPEATED(calls_that_do_not_match, 30) { contract::calls_that_do_not_match(Between::tcp, "ring", 1000, false); }

TEST(a_rank_that_does_not_come) { contract::a_rank_that_does_not_come(3, Between::tcp, "ring", 100'000, false); }

TEST(a_rank_that_leaves) { contract::a_rank_that_leaves(Between::tcp, "ring", 1000, false); }

/// Whoever gives a call sends what it can without a wait.
TEST(who_gives_a_call_begins_it) {
  constexpr int kCalls = 20;
  std::barrier begun(2);
  run_well(2, Between::tcp, [&](Communicator& group) {
    contract::Numbers tensor(10, 1, false);
    group.run(contract::sum_of(tensor, 10, "butterfly"));  // connects them
    for (int i = 0; i < kCalls; ++i) {
      const uint64_t before = group.bytes_sent();
      if (group.rank() == 1) begun.arrive_and_wait();
      const auto work = group.start(contract::sum_of(tensor, 10, "butterfly"), nullptr);
      if (group.rank() == 0) {
        CHECK(group.bytes_sent() > before && !work->done());
        begun.arrive_and_wait();
      }
      work->wait(std::chrono::seconds(60));
    }
    CHECK(tensor.values() == std::vector<int>(10, 2 << kCalls));
  });
}

/// 64 ranks on 8 hosts: nobody is connected to more than its algorithm names.
TEST(many_ranks) {
  rlimit files{};  // of one process here
  ::getrlimit(RLIMIT_NOFILE, &files);
  files.rlim_cur = files.rlim_max;
  ::setrlimit(RLIMIT_NOFILE, &files);
  constexpr int kWorld = 64;
  constexpr size_t kCount = kSanitized ? 10'000 : 100'000;
  const std::pair<const char*, int> most[] = {{"ring", 2}, {"butterfly", 6}, {"circulant", 12}, {"hierarchical", 14}};
  for (const auto& [algorithm, connections] : most) {
    run_well(kWorld, Between::eights, [&](Communicator& group) {
      contract::Numbers tensor(kCount, group.rank(), false);
      group.run(contract::sum_of(tensor, kCount, algorithm));
      CHECK(tensor.values() == std::vector<int>(kCount, kWorld * (kWorld - 1) / 2));
      CHECK(group.connections() <= connections);
    });
  }
}

TEST(the_contract) {
  for (const int world : {2, 3, 5, 8}) contract::every_algorithm(world, Between::tcp);
  for (const int world : {2, 3, 5}) contract::scaled_sums_agree(world, Between::tcp);
  contract::point_to_point(Between::tcp);
  contract::asynchronous(Between::tcp);
}

}  // namespace
