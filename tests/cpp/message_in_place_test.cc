// Messages that ranks of one host read in each other's memory: the contract, what a message waits for, and ranks that
// give up while a peer reads.
#include "contract.h"
#include "engine/message/call_segment.h"

using namespace ringlet;

namespace {

/// One segment of an all-reduce of rank 0 of 3, which combines both peers' tensors, here 1 and 2 everywhere, with its
/// own 4.
struct OneSegment {
  static constexpr int kCount = 600;

  OneSegment() {
    shared.outbox = [](size_t, int) {};
    shared.read_in_place = [&](size_t, int message) {
      if (!valid) return false;
      told.push_back(message);
      return true;
    };
    segment.begin(shared, 0);
    for (size_t m = 0; m < plan.sent.size(); ++m) segment.sent(static_cast<int>(m));
  }

  void arrive(int message) {
    const Transfer& received = plan.received[message];
    std::vector<const std::byte*> places;
    for (int c = received.first; c < received.first + received.count; ++c) {
      places.push_back(reinterpret_cast<const std::byte*>(peers[received.peer].data()) + layout.offset(c, 0));
    }
    segment.arrived_in_place(message, places.data());
  }

  std::vector<int> own = std::vector<int>(kCount, 4);
  std::vector<std::vector<int>> peers{{}, std::vector<int>(kCount, 1), std::vector<int>(kCount, 2)};
  Call call = call_of_count();
  MessagePlan plan = make_message_plan(*find_algorithm(Collective::all_reduce, "one_shot"), {0, 3, 0, nullptr});
  CallLayout layout{call_of_count(), {0, 3, 0}, plan.parts};
  Scratch scratch = [] {
    Scratch made;
    made.resize(kCount * sizeof(int));
    return made;
  }();
  bool valid = true;
  std::vector<int> told{};
  MessageCall shared{call, plan, layout, scratch, reduce_kernel(DType::int32, ReduceOp::sum), 3, kCount, {}, {}};
  MessageSegment segment{};

 private:
  Call call_of_count() {
    Call made;
    made.collective = Collective::all_reduce;
    made.dtype = DType::int32;
    made.count = kCount;
    made.input = made.output = reinterpret_cast<std::byte*>(own.data());
    return made;
  }
};

/// Nothing is copied and nobody is told before all of a round's messages are there and combined.
TEST(messages_are_read_when_they_are_combined) {
  OneSegment one;
  one.arrive(0);
  CHECK(one.told.empty());
  one.peers[one.plan.received[0].peer].assign(OneSegment::kCount, 10);  // it is read later than this
  one.arrive(1);
  CHECK_EQ(one.told.size(), size_t{2});
  CHECK(one.own == std::vector<int>(OneSegment::kCount, 10 + one.plan.received[1].peer + 4));
  CHECK(!one.segment.complete());  // before its words are on their way
  one.segment.told();
  one.segment.told();
  CHECK(one.segment.complete());
}

/// A rank that is about to sleep copies what it was given: the sender need not wait for the rest of the round.
TEST(fetched_messages_wait_here) {
  OneSegment one;
  one.arrive(0);
  one.segment.fetch();
  CHECK_EQ(one.told.size(), size_t{1});
  one.peers[one.plan.received[0].peer].assign(OneSegment::kCount, -1000);
  one.arrive(1);
  CHECK_EQ(one.told.size(), size_t{2});
  CHECK(one.own == std::vector<int>(OneSegment::kCount, 1 + 2 + 4));
}

/// What a sender that gave up had given may have changed: the segment never completes, and waits for that sender.
TEST(what_may_have_changed_is_no_result) {
  for (const bool while_asleep : {false, true}) {
    OneSegment one;
    one.arrive(0);
    one.valid = false;
    if (while_asleep) one.segment.fetch();
    one.arrive(1);
    CHECK(one.told.empty() && !one.segment.complete());
    CHECK(one.segment.awaits(one.plan.received[0].peer));
    one.segment.fetch();
    CHECK(!one.segment.complete());
  }
}

constexpr size_t kCount = 300'000;  // several segments, whose messages are read in place

TEST_EACH(a_rank_that_does_not_come, bool registered, false, true) {
  contract::a_rank_that_does_not_come(2, Between::mixed, "hierarchical", kCount, registered);
}

TEST(calls_that_do_not_match) {
  for (int i = 0; i < 20; ++i) contract::calls_that_do_not_match(Between::mixed, "hierarchical", kCount, i % 2 == 0);
}

TEST(a_rank_that_leaves) { contract::a_rank_that_leaves(Between::mixed, "hierarchical", kCount, true); }

std::vector<std::byte*> fill(Heap& heap) {
  std::vector<std::byte*> taken;
  for (size_t bytes = heap.bytes(); bytes >= (size_t{32} << 10);) {
    try {
      taken.push_back(heap.allocate(bytes));
    } catch (const ResourceError&) {
      bytes /= 2;
    }
  }
  return taken;
}

/// Ordinary tensors then go through the ring.
TEST(a_full_heap) {
  const std::shared_ptr<Heap> heap = Heap::process();
  run_well(4, Between::mixed, [&](Communicator& group) {
    const Call barrier{.collective = Collective::barrier};
    group.run(barrier);
    std::vector<std::byte*> taken;
    if (group.rank() == 0) taken = fill(*heap);
    group.run(barrier);
    contract::Numbers tensor(kCount, 1, false);
    group.run(contract::sum_of(tensor, kCount, "hierarchical"));
    CHECK(tensor.values() == std::vector<int>(kCount, 4));
    for (std::byte* const each : taken) heap->free(each);
  });
}

TEST(the_contract) {
  for (const bool registered : {false, true}) {
    for (const int world : {2, 4, 7}) contract::every_algorithm(world, Between::mixed, registered);
  }
  contract::scaled_sums_agree(5, Between::mixed);
  contract::asynchronous(Between::mixed);
}

}  // namespace
