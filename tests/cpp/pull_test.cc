// The pull engine: the contract, staged and in place, and how threads join.
#include "contract.h"
#include "engine/call_check.h"

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

TEST_EACH(a_rank_that_leaves, Between between, Between::one_memory, Between::stages) {
  contract::a_rank_that_leaves(between, "ring", 1000, false);
}

/// Before anything moves, and whatever the engine.
TEST(a_call_that_lacks_a_tensor_is_refused) {
  float value = 1;
  auto* const there = reinterpret_cast<std::byte*>(&value);
  const Call whole{
      .collective = Collective::all_reduce, .dtype = DType::float32, .count = 1, .input = there, .output = there};
  check_call(whole, 0, 2);
  Call call = whole;
  call.input = nullptr;
  CHECK_HAS(CHECK_THROWS(InvalidUsage, check_call(call, 0, 2)), "all_reduce: this rank needs an input");
  call = whole;
  call.output = nullptr;
  CHECK_HAS(CHECK_THROWS(InvalidUsage, check_call(call, 0, 2)), "all_reduce: this rank needs an output");
  call.count = 0;
  check_call(call, 0, 2);
  call = {.collective = Collective::reduce, .dtype = DType::float32, .root = 1, .count = 1, .input = there};
  check_call(call, 0, 2);  // only the root has an output
  CHECK_HAS(CHECK_THROWS(InvalidUsage, check_call(call, 1, 2)), "reduce: this rank needs an output");
}

}  // namespace
