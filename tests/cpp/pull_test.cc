// The pull engine: the contract, staged and in place, and how threads join.
#include "contract.h"

using namespace ringlet;

namespace {

/// A rank whose join timed out may try again while others still wait for it.
TEST(join_again) {
  const auto join = [](int rank, std::chrono::milliseconds patience) {
    return join_threads("join-again", rank, 3, Deadline::after(patience));
  };
  std::thread second([&] { CHECK_EQ(join(1, std::chrono::seconds(60))->rank(), 1); });
  CHECK_THROWS(Timeout, join(0, std::chrono::milliseconds(50)));
  std::thread third([&] { CHECK_EQ(join(2, std::chrono::seconds(60))->rank(), 2); });
  CHECK_EQ(join(0, std::chrono::seconds(60))->rank(), 0);
  second.join();
  third.join();
}

TEST(the_contract) {
  for (const Between between : {Between::one_memory, Between::stages}) {
    for (const int world : {1, 2, 3, 5, 8}) contract::every_algorithm(world, between);
    contract::point_to_point(between);
  }
  for (const int world : {2, 3, 5}) contract::scaled_sums_agree(world, Between::stages);
  contract::asynchronous(Between::one_memory);
}

}  // namespace
