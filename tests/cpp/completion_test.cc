// What runs when a call is complete may give calls and wait for any, on every thread that completes some; and a group
// may be closed while other threads are in calls of its own.
#include <atomic>
#include <barrier>
#include <latch>

#include "check.h"
#include "ranks.h"

using namespace ringlet;
using namespace std::chrono_literals;

namespace {

Message message(int peer, bool sending, int& value) {
  return {peer, sending, DType::int32, 1, reinterpret_cast<std::byte*>(&value), {}};
}

/// Whether it is complete in good time; a wait that would never end fails the test instead.
bool comes(Work& work) { return work.await(Deadline::after(10s)); }

/// Two messages that arrive together: the completion of each waits for the other's.
void messages_wait_for_each_other(Communicator& group) {
  for (int turn = 0; turn < 20; ++turn) {
    int first = 0, second = 0;
    if (group.rank() != 0) {
      group.run({.collective = Collective::barrier});
      std::this_thread::sleep_for(2ms);
      group.run(message(0, true, first));
      continue;
    }
    const auto one = group.start(message(1, false, first), nullptr),
               two = group.start(message(2, false, second), nullptr);
    std::latch told(2);
    for (const auto& [mine, other] : {std::pair(one, two), std::pair(two, one)}) {
      mine->then([&told, other](std::exception_ptr) {
        CHECK(comes(*other));
        told.count_down();
      });
    }
    group.run({.collective = Collective::barrier});
    told.wait();
  }
}

/// While the completion of one call is in another that a slow peer keeps waiting, the caller may give the next.
void the_caller_goes_on(Communicator& group) {
  Floats first(100), second(100), third(100);
  if (group.rank() != 0) {
    group.run(first.sum());
    std::this_thread::sleep_for(200ms);  // longer than callers wait for their turn
    group.run(second.sum());
    group.run(third.sum());
    return;
  }
  std::latch within(1), told(1);
  group.start(first.sum(), nullptr)->then([&](std::exception_ptr) {
    within.count_down();
    group.run(second.sum());
    told.count_down();
  });
  within.wait();
  std::this_thread::sleep_for(10ms);
  group.run(third.sum());
  told.wait();
  CHECK_EQ(third.values[99], static_cast<float>(group.world()));
}

/// Threads that are in a call, or begin one, when another closes the group: each gets an error, soon.
void closed_by_another_thread(Communicator& group, bool with_messages, std::barrier<>& all) {
  Floats data;
  group.run(data.sum());
  if (group.rank() == 0) {
    std::atomic<bool> closed{false};
    std::thread other([&] {
      int value = 0;
      if (with_messages) CHECK_THROWS(Error, group.run(message(1, false, value)));
      CHECK_THROWS(Error, group.run(data.sum()));
      while (!closed) {
        CHECK_THROWS(Error, group.start(message(1, false, value), nullptr)->wait(10s));
        CHECK_THROWS(Error, group.start(data.sum(), nullptr)->wait(10s));
      }
    });
    std::this_thread::sleep_for(50ms);
    const auto start = Deadline::Clock::now();
    group.close(100ms);
    CHECK(Deadline::Clock::now() - start < 10s);  // the group's timeout is 60 s
    closed = true;
    other.join();
  }
  all.arrive_and_wait();
}

/// Whoever was about to post when the end came is told, and does not wait for what nobody moves.
TEST(after_the_end) {
  const auto engine = make_engine("after the end", 0, 1, Between::stages, {});
  const auto messenger = std::make_shared<Messenger>(engine->p2p());
  messenger->end();
  int value = 0;
  CHECK_THROWS(InvalidUsage, messenger->post(message(0, false, value), nullptr, true));
}

TEST(calls_complete_over_every_transport) {
  for (const Between between : {Between::one_memory, Between::stages, Between::tcp}) {
    run_well(3, between, messages_wait_for_each_other);
    run_well(2, between, the_caller_goes_on);
    for (const bool with_messages : {false, true}) {
      std::barrier<> all(2);
      run_well(2, between, [&](Communicator& group) { closed_by_another_thread(group, with_messages, all); });
    }
  }
}

}  // namespace
