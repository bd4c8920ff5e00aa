// The queue of asynchronous calls: who carries a call on, in which order, and where what follows a completion runs. The
// engine is a scripted one, in which a peer "comes" when the test says so.
#include "comm/call_queue.h"

#include <atomic>
#include <ctime>
#include <latch>
#include <optional>
#include <stdexcept>

#include "check.h"
#include "engine/selector.h"

using namespace ringlet;
using namespace std::chrono_literals;

namespace {

constexpr auto kSoon = 20s;  // far more than it takes: a test fails where it would hang

/// A call is complete once `peers` has come to its sequence number.
class ScriptedEngine final : public Engine, private Health::Carrier {
 public:
  ScriptedEngine() : Engine(0, 2, *this, false) {}
  const char* transport() const noexcept override { return "scripted"; }
  void run(const Call&, bool) override {}
  const Algorithm& algorithm_for(Collective, size_t, bool) const override { throw InvalidUsage("not asked"); }
  const Selector& selector() const noexcept override { return selector_; }
  P2p& p2p() override { throw InvalidUsage("not asked"); }
  bool registered(const void*, size_t) const noexcept override { return false; }
  uint64_t bytes_received() const noexcept override { return 0; }
  const std::vector<int>& host_of_rank() const noexcept override { return hosts_; }
  void leave(bool, std::chrono::milliseconds) override {}
  bool send(const Health::Report&) noexcept override { return true; }
  void poll(Health::Look) override {}

  bool advance(const Call& call, bool, Awaited* awaits) override {
    CHECK_EQ(inside.exchange(true), false);  // one thread at a time
    if (current != &call) {
      CHECK(current == nullptr);  // one call at a time
      current = &call;
      begun.push_back(call.sequence);
      began_on = std::this_thread::get_id();
    }
    const bool complete = peers >= call.sequence;
    if (!complete && awaits != nullptr) *awaits = {.peer = 1, .target = call.sequence};
    if (complete || failing == call.sequence) current = nullptr;
    inside = false;
    if (failing == call.sequence) throw PeerLost("scripted");
    return complete;
  }
  bool overlaps() const noexcept override { return false; }
  void sleep(const Awaited& awaited, std::chrono::nanoseconds most) noexcept override {
    ++sleeps;
    if (peers < awaited.target) std::this_thread::sleep_for(std::min<std::chrono::nanoseconds>(most, 1ms));
  }

  bool is_awaited() const noexcept override { return awaited; }

  std::atomic<uint64_t> peers{0};
  std::atomic<bool> awaited{false};
  uint64_t failing = 0;
  std::atomic<int> sleeps{0};
  std::vector<uint64_t> begun;
  std::thread::id began_on;

 private:
  const Call* current = nullptr;
  std::atomic<bool> inside{false};
  const Selector selector_;
  const std::vector<int> hosts_{0, 0};
};

struct Queue {
  Queue() { queue->make_ready(); }
  ~Queue() {
    engine.peers = 1'000'000;
    queue->end();
  }
  std::shared_ptr<Work> give(uint64_t sequence) {
    auto work = queue->submit({.call = {.sequence = sequence}, .whole = nullptr, .keep = nullptr});
    queue->progress(/*given=*/true);
    return work;
  }
  ScriptedEngine engine;
  std::shared_ptr<CallQueue> queue = std::make_shared<CallQueue>(engine);
};

bool comes(Work& work) { return work.await(Deadline::after(kSoon)); }

TEST(a_call_whose_peers_are_there_is_complete_at_once) {
  Queue q;
  q.engine.peers = 1;
  const auto work = q.give(1);
  CHECK(work->done());
  CHECK(q.engine.began_on == std::this_thread::get_id());
  CHECK(!q.queue->pending());
}

TEST(who_gives_a_call_begins_it_and_does_not_wait) {
  Queue q;
  const auto work = q.give(1);
  CHECK(!work->done());
  CHECK(q.engine.began_on == std::this_thread::get_id());
  q.engine.peers = 1;
  CHECK(comes(*work));
}

TEST(nobody_comes_but_the_queues_thread) {
  Queue q;
  const auto first = q.give(1), second = q.give(2);
  q.engine.peers = 2;
  const Deadline deadline = Deadline::after(kSoon);
  while (!second->done() && !deadline.passed()) std::this_thread::sleep_for(1ms);
  CHECK(first->done() && second->done());
  CHECK_EQ(q.engine.begun.size(), size_t{2});
}

TEST(calls_given_as_one_run_in_order_and_complete_together) {
  Queue q;
  const std::vector<Call> later{{.sequence = 2}, {.sequence = 3}};
  q.engine.peers = 2;
  const auto work = q.queue->submit({.call = {.sequence = 1}, .later = later});
  q.queue->progress(/*given=*/true);
  CHECK(!work->done());  // the third call's peers are still to come
  const auto behind = q.give(4);
  q.engine.peers = 4;
  CHECK(comes(*behind));
  CHECK(work->done());
  CHECK(q.engine.begun == (std::vector<uint64_t>{1, 2, 3, 4}));
}

std::chrono::nanoseconds used_by_this_thread() {
  timespec time{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return std::chrono::seconds(time.tv_sec) + std::chrono::nanoseconds(time.tv_nsec);
}

/// Computes for less than the thread's patience with a call in the queue. Whether the call was left alone; nothing where others took the
/// processor from this thread meanwhile: then it did not compute, and the call may be taken over.
std::optional<bool> is_left_alone_beside_computation() {
  Queue q;
  std::this_thread::sleep_for(400ms);  // the queue's thread sleeps now, so that the call wakes it
  const auto work = q.give(1);
  q.engine.peers = 1;
  const auto began = std::chrono::steady_clock::now();
  const auto before = used_by_this_thread();
  volatile uint64_t spun = 0;
  while (std::chrono::steady_clock::now() < began + 3ms) spun = spun + 1;
  const bool alone = q.queue->pending();
  const bool computed = used_by_this_thread() - before > 2800us;
  q.engine.awaited = true;
  const Deadline deadline = Deadline::after(kSoon);
  while (q.queue->pending() && !deadline.passed()) spun = spun + 1;
  CHECK(!q.queue->pending());
  return computed ? std::optional(alone) : std::nullopt;
}

/// The rank computes, and no peer waits for it: the thread would take the processor from the computation. A short loss
/// of the processor, which the sum over 3 ms does not show, may spoil some attempts. Beside much other work few count.
TEST(a_computing_rank_is_left_alone_until_a_peer_sleeps) {
  int left_alone = 0, taken_over = 0;
  for (int attempt = 0; attempt < 8; ++attempt) {
    const auto alone = is_left_alone_beside_computation();
    left_alone += alone == true;
    taken_over += alone == false;
  }
  CHECK(left_alone >= taken_over);
}

TEST(calls_run_in_order_and_one_after_the_other) {
  Queue q;
  std::vector<std::shared_ptr<Work>> works;
  for (uint64_t i = 1; i <= 50; ++i) {
    works.push_back(q.give(i));
    if (i % 3 == 0) q.engine.peers = i - 1;
  }
  CHECK(!works.back()->done());
  q.engine.peers = 50;
  CHECK(comes(*works.back()));
  for (uint64_t i = 0; i < 50; ++i) CHECK_EQ(q.engine.begun[i], i + 1);
}

/// Threads that wait for different calls, while the peers come one by one.
TEST_REPEATED(several_threads_wait, 20) {
  Queue q;
  std::vector<std::shared_ptr<Work>> works;
  for (uint64_t i = 1; i <= 8; ++i) works.push_back(q.give(i));
  std::vector<std::thread> waiters;
  for (const auto& work : works) waiters.emplace_back([&work] { CHECK(comes(*work)); });
  for (uint64_t i = 1; i <= 8; ++i) {
    std::this_thread::sleep_for(2ms);
    q.engine.peers = i;
  }
  for (std::thread& waiter : waiters) waiter.join();
}

/// The wait ends in time, and the call goes on.
TEST(a_wait_has_a_deadline) {
  Queue q;
  const auto work = q.give(1);
  CHECK_THROWS(Timeout, work->wait(5ms));
  CHECK(!work->done());
  CHECK(q.engine.sleeps > 0);
  q.engine.peers = 1;
  work->wait(kSoon);
}

/// What is attached to a call never runs inside of a later call that the user makes, or of a question.
TEST_REPEATED(user_code_does_not_run_in_other_calls, 20) {
  Queue q;
  const auto first = q.give(1);
  std::atomic<bool> noted{false}, told_here{false};
  std::latch told(1);
  first->note_end([&](const std::exception_ptr&) { noted = true; });
  first->then([&, here = std::this_thread::get_id()](const std::exception_ptr&) {
    told_here = std::this_thread::get_id() == here;
    told.count_down();
  });
  q.engine.peers = 1;
  const auto second = q.give(2);
  first->test();
  told.wait();
  CHECK(noted);
  CHECK(!told_here);
  q.engine.peers = 2;
  CHECK(comes(*second));
}

TEST_REPEATED(what_a_completion_gives_runs_ahead, 20) {
  Queue q;
  const auto first = q.give(1), second = q.give(2);
  std::vector<int> order;
  std::latch told(1);
  first->then([&](const std::exception_ptr&) {
    CHECK(q.queue->may_run_ahead());
    const auto ahead = q.queue->reserve({});
    q.queue->run_reserved(*ahead, [&] { order.push_back(static_cast<int>(q.engine.begun.size())); }, nullptr);
    told.count_down();
  });
  q.engine.peers = 2;
  CHECK(comes(*second));
  told.wait();
  CHECK_EQ(order.size(), size_t{1});
  CHECK_EQ(order[0], 1);  // the second call had not begun
}

TEST(an_error_ends_its_call_alone) {
  Queue q;
  q.engine.failing = 1;
  const auto first = q.give(1);
  CHECK_THROWS(PeerLost, first->wait(kSoon));
  q.engine.peers = 2;
  q.give(2)->wait(kSoon);
}

TEST(what_runs_in_one_go_is_the_threads) {
  Queue q;
  std::atomic<bool> here{true};
  const auto whole =
      q.queue->submit({.call = {},
                       .whole = [&, id = std::this_thread::get_id()] { here = std::this_thread::get_id() == id; },
                       .keep = nullptr});
  q.engine.peers = 2;
  const auto next = q.give(2);
  CHECK(comes(*next));
  CHECK(whole->done());
  CHECK(!here);
}

/// Whichever thread runs the completion, and whether the call behind it runs in one go.
TEST_REPEATED(a_completion_waits_for_the_next, 20) {
  for (const bool in_one_go : {false, true}) {
    Queue q;
    const auto first = q.give(1);
    bool ran = !in_one_go;
    const auto next =
        in_one_go ? q.queue->submit({.call = {}, .whole = [&] { ran = true; }, .keep = nullptr}) : q.give(2);
    std::latch told(1);
    first->then([&](const std::exception_ptr&) {
      CHECK(comes(*next));
      told.count_down();
    });
    q.engine.peers = in_one_go ? 1 : 2;
    CHECK(comes(*first));
    told.wait();
    CHECK(ran);
  }
}

TEST_REPEATED(an_end_lets_waiting_threads_out, 20) {
  std::thread waiter;
  {
    Queue q;
    const auto work = q.give(1);
    waiter = std::thread([work] { CHECK(comes(*work)); });
    std::this_thread::sleep_for(2ms);
  }
  waiter.join();
}

TEST_REPEATED(an_end_waits_for_what_follows_a_completion, 20) {
  std::atomic<bool> told{false};
  std::latch began(1);
  std::thread waiter;
  {
    Queue q;
    const auto work = q.give(1);
    work->then([&](const std::exception_ptr&) {
      began.count_down();
      std::this_thread::sleep_for(5ms);
      told = true;
    });
    waiter = std::thread([work] { CHECK(comes(*work)); });
    q.engine.peers = 1;
    began.wait();
    q.queue->end();
    CHECK(told);
  }
  waiter.join();
}

}  // namespace
