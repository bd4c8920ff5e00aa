// How calls end: with errors that are their waiters' own; what two threads of a rank do at the same time, one of which
// may end the group; and groups whose last user is what runs when one of their calls is complete, on a thread that they
// would have to wait for.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <latch>

#include "check.h"
#include "ranks.h"

using namespace ringlet;

namespace {

enum class Last { collective, message, message_waited_for };

int threads_of_this_process() {
  const auto tasks = std::filesystem::directory_iterator("/proc/self/task");
  return static_cast<int>(std::distance(begin(tasks), end(tasks)));
}

std::string said(const std::exception_ptr& error) {
  try {
    if (error) std::rethrow_exception(error);
  } catch (const std::exception& told) {
    return told.what();
  }
  return "";
}

/// Starts a call and lets go of the group, which only what runs when the call is complete holds then. Rank 0's
/// message waits until rank 1 has let go, and collectives until both have.
void let_go(std::shared_ptr<Communicator> group, Last last, std::latch& rank_1, std::latch& both) {
  Floats data;
  const int rank = group->rank();
  std::shared_ptr<Work> work;
  if (last == Last::collective) {
    const Communicator::Job job = [&both, call = data.sum()](const std::function<void(Call)>& run) {
      both.wait();
      run(call);
    };
    work = group->start(job, nullptr);
  } else {
    if (rank == 0) rank_1.wait();
    work = group->start(data.message(1 - rank, rank == 0), nullptr);
  }
  std::latch called(1);
  work->then([group = std::move(group), last, &called](std::exception_ptr error) mutable {
    CHECK_EQ(said(error), std::string());
    if (last == Last::collective) CHECK_THROWS(InvalidUsage, group->close(std::chrono::seconds(1)));
    group.reset();
    called.count_down();
  });
  both.count_down();
  if (rank == 1) rank_1.count_down();
  if (last == Last::message_waited_for) work->wait(std::chrono::seconds(60));
  called.wait();
}

void run(Between between, Last last, int turn) {
  const std::string name = "ending-" + std::to_string(turn);
  const Token key = random_token();
  std::latch rank_1(1), both(2);
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < 2; ++rank) {
    ranks.emplace_back([&, rank] {
      auto engine = make_engine(name, rank, 2, between, key);
      let_go({new Communicator(std::move(engine), std::chrono::seconds(60)), Communicator::dispose}, last, rank_1,
             both);
    });
  }
  for (std::thread& rank : ranks) rank.join();
}

/// In a child that rank 0 forks when its group has threads: it can call nothing, and its copy ends without them.
void end_in_child(std::unique_ptr<Communicator> group) {
  ::alarm(60);
  Floats value(1);
  const Call call = value.sum();
  const Message message = value.message(1, true);
  const auto nothing = [](const std::function<void(Call)>&) {};
  for (const std::function<void()>& act : std::initializer_list<std::function<void()>>{
           [&] { group->run(call); }, [&] { group->start(call, nullptr); }, [&] { group->run(nothing); },
           [&] { group->start(nothing, nullptr); }, [&] { group->run(message); },
           [&] { group->start(message, nullptr); }, [&] { group->on_gpu(0); }, [&] { group->abort("the child"); }}) {
    const std::string text = "this group belongs to process " + std::to_string(::getppid());
    CHECK_EQ(CHECK_THROWS(InvalidUsage, act()).substr(0, text.size()), text);
  }
  group->health().poison(Timeout("in the child"));
  CHECK(!group->health().failure());
  group.reset();
  ::_exit(check_failures == 0 ? 0 : 1);
}

void forked(Between between) {
  const std::string name = "forked-" + std::to_string(static_cast<int>(between));
  const Token key = random_token();
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < 2; ++rank) {
    ranks.emplace_back([&, rank] {
      auto group = std::make_unique<Communicator>(make_engine(name, rank, 2, between, key), std::chrono::seconds(60));
      Floats data;
      group->start(data.message(1 - rank, rank == 0), nullptr)->wait(std::chrono::seconds(60));
      group->start(data.sum(), nullptr)->wait(std::chrono::seconds(60));
      if (rank == 0) {
        const pid_t child = ::fork();
        if (child == 0) end_in_child(std::move(group));
        int status = -1;
        ::waitpid(child, &status, 0);
        CHECK_EQ(status, 0);
      }
      group->run(data.sum());
      CHECK_EQ(data.values[999], 4.0f);
    });
  }
  for (std::thread& rank : ranks) rank.join();
}

/// Who waits holds its error alone: the completing thread may be the last that knows of the call, and nothing orders
/// what it drops then after what a waiter reads.
TEST(own_errors) {
  auto work = std::make_shared<Work>();
  std::atomic<bool> read{false};
  std::thread completing([&read, work]() mutable {
    const auto error = std::make_exception_ptr(Timeout("late"));
    std::exchange(work, nullptr)->complete(error);
    while (!read.load(std::memory_order_relaxed)) std::this_thread::yield();
  });
  const auto waited = [&] { std::exchange(work, nullptr)->wait(std::chrono::seconds(60)); };
  CHECK_EQ(CHECK_THROWS(Timeout, waited()), std::string("late"));
  read.store(true, std::memory_order_relaxed);
  completing.join();

  Work late;
  late.complete(std::make_exception_ptr(Timeout("late")));
  const auto again = [&](const Timeout& first) {
    try {
      late.raise_if_failed();
    } catch (const Timeout& second) {
      return &first != &second;
    }
    return false;
  };
  try {
    late.raise_if_failed();
    CHECK(!"it has failed");
  } catch (const Timeout& first) {
    CHECK(again(first));
  }

  Work foreign;
  foreign.complete(std::make_exception_ptr(std::bad_alloc()));
  CHECK_THROWS(std::bad_alloc, foreign.wait(std::chrono::seconds(1)));
  std::exception_ptr told;
  foreign.then([&](std::exception_ptr error) { told = error; });
  CHECK_EQ(said(told), std::string("std::bad_alloc"));
}

/// What a thread does to a group that another thread uses.
enum class Act { call, async_call, message, async_message, close, abort, new_group };
constexpr Act kActs[] = {Act::call,  Act::async_call, Act::message,  Act::async_message,
                         Act::close, Act::abort,      Act::new_group};

/// Does it a few times; an error of the library ends that, and nothing else may come.
void act(Communicator& group, Act what, const std::function<void()>& make_group) {
  try {
    for (int i = 0; i < 3; ++i) {
      Floats ones(3000);
      switch (what) {
        case Act::call:
          group.run(ones.sum());
          CHECK_EQ(ones.values.back(), 2.0f);
          break;
        case Act::async_call: {
          const auto keep = std::make_shared<Floats>(3000);
          group.start(keep->sum(), keep)->wait(std::chrono::seconds(60));
          CHECK_EQ(keep->values.back(), 2.0f);
          break;
        }
        case Act::message: group.run(ones.message(1, true)); break;
        case Act::async_message: {
          const auto keep = std::make_shared<Floats>(3000);
          group.start(keep->message(1, true), keep)->wait(std::chrono::seconds(60));
          break;
        }
        case Act::close: return group.close(std::chrono::milliseconds(20));
        case Act::abort:  // often, so that one of them meets each part of another thread's close()
          for (int again = 0; again < 20; ++again) group.abort("enough");
          break;
        case Act::new_group: make_group(); break;
      }
    }
  } catch (const Error&) {
  }
}

/// Until the group ends.
void follow(const std::function<void(Floats&)>& call) {
  try {
    for (;;) {
      Floats ones(3000);
      call(ones);
    }
  } catch (const Error&) {
  }
}

/// Two threads of rank 0 act at the same time; a thread of rank 1 makes the calls that belong to it, and one takes the
/// messages.
void at_the_same_time(Between between, Act first, Act second, int turn) {
  const std::string name = "together-" + std::to_string(turn);
  const Token key = random_token();
  std::shared_ptr<Communicator> groups[2];
  const auto all = [](const std::vector<std::function<void()>>& acts) {
    std::latch begin(static_cast<std::ptrdiff_t>(acts.size()));
    std::vector<std::thread> threads;
    for (const auto& act : acts) {
      threads.emplace_back([&begin, act] {
        begin.arrive_and_wait();
        act();
      });
    }
    for (std::thread& thread : threads) thread.join();
  };
  const auto make = [&](int rank, const std::string& title, const Token& secret) {
    return std::shared_ptr<Communicator>(
        new Communicator(make_engine(title, rank, 2, between, secret), std::chrono::seconds(60)),
        Communicator::dispose);
  };
  all({[&] { groups[0] = make(0, name, key); }, [&] { groups[1] = make(1, name, key); }});
  std::atomic<int> more{0};
  const auto new_group = [&] {
    const std::string title = name + "/" + std::to_string(more++);
    const Token secret = random_token();
    all({[&] { make(0, title, secret)->run(Floats(3000).sum()); },
         [&] { make(1, title, secret)->run(Floats(3000).sum()); }});
  };
  std::thread rank_1([&] {
    all({[&] { follow([&](Floats& ones) { groups[1]->run(ones.sum()); }); },
         [&] { follow([&](Floats& ones) { groups[1]->run(ones.message(0, false)); }); }});
    groups[1].reset();
  });
  all({[&] { act(*groups[0], first, new_group); }, [&] { act(*groups[0], second, new_group); }});
  groups[0].reset();
  rank_1.join();
}

int turn = 0;

TEST(two_acts_at_the_same_time) {
  for (const Between between : {Between::one_memory, Between::stages, Between::tcp}) {
    for (const Act first : kActs) {
      for (const Act second : kActs) {
        if (first > second) continue;
        const bool both_end = first == Act::close && second == Act::abort;
        const int turns = both_end ? 60 : few_cases() ? 2 : 10;
        for (int i = 0; i < turns; ++i) at_the_same_time(between, first, second, turn++);
      }
    }
  }
}

TEST(a_forked_child_ends_no_group) {
  // A sanitizer's own locks may be held by a thread that the child lacks.
  for (const Between between : {Between::one_memory, Between::stages, Between::tcp}) {
    if (!kSanitized) forked(between);
  }
}

TEST(ended_groups_leave_no_thread) {
  run(Between::tcp, Last::collective, turn++);  // the process's listener opens, whose thread stays
  int before = 0;
  while (before != threads_of_this_process()) {
    before = threads_of_this_process();
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
  }
  for (const Between between : {Between::one_memory, Between::stages, Between::tcp}) {
    for (const Last last : {Last::collective, Last::message, Last::message_waited_for}) {
      for (int i = 0; i < 20; ++i) run(between, last, turn++);
    }
  }
  const Deadline soon = Deadline::after(std::chrono::seconds(60));
  while (threads_of_this_process() > before && !soon.passed()) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  CHECK(threads_of_this_process() <= before);
}

}  // namespace
