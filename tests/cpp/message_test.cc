// The message engine: the contract over TCP, calls that do not match, and ranks that go or do not come.
#include <sys/resource.h>

#include <barrier>

#include "contract.h"

using namespace ringlet;

namespace {

Call sum_of(std::vector<float>& tensor, const char* algorithm) {
  Call call;
  call.collective = Collective::all_reduce;
  call.algorithm = find_algorithm(Collective::all_reduce, algorithm);
  call.dtype = DType::float32;
  call.count = tensor.size();
  call.input = reinterpret_cast<const std::byte*>(tensor.data());
  call.output = reinterpret_cast<std::byte*>(tensor.data());
  return call;
}

/// Who is in another call hears so at once, and everybody who waits, with both calls named.
TEST_REPEATED(calls_that_do_not_match, 30) {
  // Some ranks fail and leave before others are connected to them: they hear why all the same.
  const auto errors = run_ranks(4, Between::tcp, [&](Communicator& group) {
    std::vector<float> tensor(group.rank() == 2 ? 500 : 1000, 1.0f);
    group.run(sum_of(tensor, "ring"));
  });
  for (const std::string& error : errors) {
    CHECK_HAS(error, "InvalidUsage: ", "500 elements", "1000 elements");
  }
}

/// The rank that is elsewhere is named by all, not only by those who wait for it directly.
TEST(a_rank_that_does_not_come) {
  const auto errors = run_ranks_but_one(3, 5, Between::tcp, [](Communicator& group) {
    std::vector<float> tensor(100'000, 1.0f);
    group.run(sum_of(tensor, "ring"));
  });
  for (int rank = 0; rank < 5; ++rank) {
    if (rank != 3) CHECK_HAS(errors[rank], "Timeout: ", "for rank 3");
  }
}

/// A rank that leaves early is named, by those who waited for it and by those who waited for them.
TEST(a_rank_that_leaves) {
  const auto errors = run_ranks(4, Between::tcp, [&](Communicator& group) {
    std::vector<float> tensor(1000, 1.0f);
    group.run(sum_of(tensor, "ring"));
    if (group.rank() != 1) group.run(sum_of(tensor, "ring"));
  });
  for (int rank = 0; rank < 4; ++rank) {
    if (rank != 1) CHECK_HAS(errors[rank], "PeerLost: ", "rank 1 left the group");
  }
  CHECK_EQ(errors[1], "");
}

/// Whoever gives a call sends what it can without a wait.
TEST(who_gives_a_call_begins_it) {
  constexpr int kCalls = 20;
  std::barrier begun(2);
  const auto errors = run_ranks(2, Between::tcp, [&](Communicator& group) {
    std::vector<float> tensor(10, 1.0f);
    group.run(sum_of(tensor, "butterfly"));  // connects them
    for (int i = 0; i < kCalls; ++i) {
      const uint64_t before = group.bytes_sent();
      if (group.rank() == 1) begun.arrive_and_wait();
      const auto work = group.start(sum_of(tensor, "butterfly"), nullptr);
      if (group.rank() == 0) {
        CHECK(group.bytes_sent() > before && !work->done());
        begun.arrive_and_wait();
      }
      work->wait(std::chrono::seconds(60));
    }
    CHECK(tensor == std::vector<float>(tensor.size(), static_cast<float>(2 << kCalls)));
  });
  for (const std::string& error : errors) CHECK_EQ(error, "");
}

/// 64 ranks on 8 hosts: nobody is connected to more than its algorithm names.
TEST(many_ranks) {
  rlimit files{};  // of one process here
  ::getrlimit(RLIMIT_NOFILE, &files);
  files.rlim_cur = files.rlim_max;
  ::setrlimit(RLIMIT_NOFILE, &files);
  constexpr int kWorld = 64;
  const std::pair<const char*, int> most[] = {{"ring", 2}, {"butterfly", 6}, {"circulant", 12}, {"hierarchical", 14}};
  for (const auto& [algorithm, connections] : most) {
    const auto errors = run_ranks(kWorld, Between::eights, [&](Communicator& group) {
      std::vector<float> tensor(100'000, static_cast<float>(group.rank()));
      group.run(sum_of(tensor, algorithm));
      CHECK(tensor == std::vector<float>(tensor.size(), kWorld * (kWorld - 1) / 2.0f));
      CHECK(group.connections() <= connections);
    });
    for (const std::string& error : errors) CHECK_EQ(error, "");
  }
}

TEST(the_contract) {
  for (const int world : {2, 3, 5, 8}) contract::every_algorithm(world, Between::tcp);
  for (const int world : {2, 3, 5}) contract::scaled_sums_agree(world, Between::tcp);
  contract::point_to_point(Between::tcp);
  contract::asynchronous(Between::tcp);
}

}  // namespace
