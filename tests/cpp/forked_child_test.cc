// A child is forked while other threads of its parent hold locks of the process again and again: it has the locks, but
// not the threads that would release them, and must not wait for them.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <functional>
#include <string>
#include <thread>

#include "base/log.h"
#include "check.h"
#include "engine/authored.h"
#include "log_place.h"
#include "memory/heap.h"
#include "transport/in_process.h"
#include "transport/listener.h"

using namespace ringlet;
using namespace std::chrono_literals;

namespace {

/// Whether every child came to its end.
bool fork_beside(int forks, const std::function<void(int thread)>& act) {
  std::atomic<bool> over{false};
  std::atomic<int> begun{0};
  std::thread busy[2];
  for (int i = 0; i < 2; ++i) {
    busy[i] = std::thread([&, i] {
      for (++begun; !over;) act(i);
    });
  }
  while (begun < 2) ::sched_yield();
  int hung = 0;
  for (int i = 0; i < forks && hung == 0; ++i) {
    const pid_t child = ::fork();
    if (child == 0) {
      ::alarm(100);
      act(2);
      ::_exit(0);
    }
    int status = 0;
    CHECK(::waitpid(child, &status, 0) == child);
    if (status != 0) ++hung;
  }
  over = true;
  for (std::thread& thread : busy) thread.join();
  return hung == 0;
}

/// Also when the first use of all is under way, so in processes that have made none.
void fork_beside(const char* what, const std::function<void(int thread)>& act) {
  bool ended = true;
  for (int process = 0; process < 30 && ended; ++process) {
    const pid_t fresh = ::fork();
    if (fresh == 0) ::_exit(fork_beside(2, act) ? 0 : 1);
    int status = 0;
    CHECK(::waitpid(fresh, &status, 0) == fresh);
    ended = status == 0;
  }
  check_report(ended, __FILE__, __LINE__, std::string("a forked child hangs in the first use of ") + what);
  check_report(fork_beside(300, act), __FILE__, __LINE__, std::string("a forked child hangs in ") + what);
}

void look_at_algorithms(int) {
  // Of each thread: a child cannot pass the guard of a static that another thread of its parent was making.
  thread_local const Algorithm& algorithm = add_algorithm(Collective::barrier, "forked", "");
  hand_over(algorithm, {.world = 1, .root = 0, .hosts = {0}},
            {schedule_of(*find_algorithm(Collective::barrier, "dissemination"), {0, 1, 0})});
  schedule_of(algorithm, {0, 1, 0});
}

TEST(forked_children_come_to_their_end) {
  fork_beside("the heap", [](int) { Heap::process(); });
  fork_beside("the listener", [](int) { Listener::process(); });
  fork_beside("a threads group", [](int thread) {
    join_threads("forked " + std::to_string(thread), 0, 1, Deadline::after(60s), TensorMemory::shared);
  });
  const LogPlace place;
  LogPlace::set("info", place.file("lines"));
  fork_beside("the log", [](int) {
    configure_log();
    log(LogLevel::info, {}, "text");
  });
  fork_beside("the algorithms", &look_at_algorithms);
}

}  // namespace
