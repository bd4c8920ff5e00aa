// The meeting of two ranks while signals interrupt one of them all the time, its deadline, and its token.
#include "transport/handshake.h"

#include <dlfcn.h>
#include <poll.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdarg>
#include <cstring>
#include <optional>
#include <thread>

#include "base/error.h"
#include "base/interrupts.h"
#include "check.h"

using namespace ringlet;
using namespace std::chrono_literals;

namespace {

thread_local bool without_pidfds = false;

}  // namespace

/// The library's own calls come here.
extern "C" long syscall(long number, ...) {
  static const auto real = reinterpret_cast<long (*)(long, ...)>(::dlsym(RTLD_NEXT, "syscall"));
  if (number == SYS_pidfd_open && without_pidfds) {
    errno = ENOSYS;
    return -1;
  }
  va_list given;
  va_start(given, number);
  long words[6];
  for (long& word : words) word = va_arg(given, long);
  va_end(given);
  return real(number, words[0], words[1], words[2], words[3], words[4], words[5]);
}

namespace {

/// A timer whose signals interrupt what the main thread does, and restart nothing.
class Interruptions {
 public:
  Interruptions() {
    struct sigaction action{};
    action.sa_handler = [](int) {};
    ::sigaction(SIGALRM, &action, nullptr);
    set(200us);
  }
  ~Interruptions() { set(0us); }

 private:
  static void set(std::chrono::microseconds every) {
    const timeval time{0, static_cast<suseconds_t>(every.count())};
    const itimerval timer{time, time};
    ::setitimer(ITIMER_REAL, &timer, nullptr);
  }
};

struct Ranks {
  Handshake rank[2] = {Handshake(0, 2), Handshake(1, 2)};
  Token told[2] = {rank[0].token(), rank[1].token()};  // in the store
  Descriptor heap{::eventfd(0, EFD_CLOEXEC)};

  std::vector<Introduced> exchange(int own, const Deadline& deadline) {
    const std::vector<Handshake::Peer> peers{{rank[0].name(), told[0]}, {rank[1].name(), told[1]}};
    const int handed[] = {heap.get()};
    std::vector<Introduced> joined(2);
    rank[own].exchange(peers, handed, joined, deadline, [] {});
    return joined;
  }
};

/// Unauthenticated connections that came and went, as many as a rank's socket lets wait: who comes after them
/// waits in connect().
void crowd(const Handshake& before) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path + 1, before.name().data(), before.name().size());
  const auto length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + before.name().size());
  int result = 0;
  for (int i = 0; i < 100 && result == 0; ++i) {
    const Descriptor client(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    result = ::connect(client.get(), reinterpret_cast<const sockaddr*>(&address), length);
  }
  CHECK_EQ(result, -1);
}

/// What the meeting of rank `own` says of its end: "" where it joined the other.
std::string outcome(Ranks& ranks, int own, const Deadline& deadline) {
  try {
    CHECK_EQ(ranks.exchange(own, deadline)[1 - own].pid, ::getpid());
  } catch (const Error& error) {
    return std::string(name(error.kind())) + ": " + error.what();
  }
  return "";
}

/// The other rank comes late, so that this one, in the main thread, waits for it under the signals.
void signals_do_not_end_a_meeting(int own, bool crowded) {
  Ranks ranks;
  if (crowded) crowd(ranks.rank[0]);
  const Deadline deadline = Deadline::after(20s);
  std::thread other([&] {
    std::this_thread::sleep_for(5ms);
    CHECK_EQ(outcome(ranks, 1 - own, deadline), "");
  });
  {
    const Interruptions interruptions;
    CHECK_EQ(outcome(ranks, own, deadline), "");
  }
  other.join();
}

void a_deadline_ends_a_meeting(bool crowded, bool interrupted) {
  Ranks ranks;
  if (crowded) crowd(ranks.rank[0]);
  const Deadline deadline = Deadline::after(50ms);
  std::optional<Interruptions> interruptions;
  if (interrupted) interruptions.emplace();
  CHECK_EQ(outcome(ranks, 1, deadline),
           "Timeout: rank 1 of 2 was not joined by rank(s) 0 in time: they may have failed, or not have started");
  CHECK(deadline.passed());
}

/// Who has not read a rank's token from the store gets no memory of that rank.
TEST(a_wrong_token_joins_nobody) {
  Ranks ranks;
  ranks.told[0] = random_token();
  const Deadline deadline = Deadline::after(200ms);
  std::string told_to_1;
  std::thread other([&] { told_to_1 = outcome(ranks, 1, deadline); });
  CHECK_EQ(outcome(ranks, 0, deadline),
           "Timeout: rank 0 of 2 was not joined by rank(s) 1 in time: they may have failed, or not have started");
  other.join();
  CHECK(!told_to_1.empty());
}

bool is_readable(const Descriptor& descriptor) {
  pollfd wait{descriptor.get(), POLLIN, 0};
  return ::poll(&wait, 1, 0) > 0;
}

constexpr int kBoth = 2;

/// The connection stays open while its one end is watched, though the other end is not.
TEST_EACH(who_has_no_pidfd_watches_the_connection, int blind, 0, 1, kBoth) {
  Ranks ranks;
  std::vector<Introduced> joined[2];
  const Deadline deadline = Deadline::after(20s);
  std::thread other([&] {
    without_pidfds = blind != 0;
    joined[1] = ranks.exchange(1, deadline);
  });
  without_pidfds = blind != 1;
  joined[0] = ranks.exchange(0, deadline);
  without_pidfds = false;
  other.join();
  for (const int own : {0, 1}) CHECK(!is_readable(joined[own][1 - own].watch));
  const int watched = blind == kBoth ? 0 : 1 - blind;
  joined[watched].clear();
  CHECK(is_readable(joined[1 - watched][watched].watch));
}

struct Stop : Interrupted {
  Stop() : Interrupted("Stop") {}
};

/// Whose handler raises: where one does not, the tests above go on.
void an_interrupt_ends_a_meeting(int own, bool crowded) {
  Ranks ranks;
  if (crowded) crowd(ranks.rank[0]);
  static std::atomic<int> checks;
  checks = 0;
  set_interrupt_check([] {
    if (++checks == 2) throw Stop();
  });
  const Deadline deadline = Deadline::after(20s);
  bool stopped = false;
  try {
    outcome(ranks, own, deadline);
  } catch (const Stop&) {
    stopped = true;
  }
  set_interrupt_check(nullptr);
  CHECK(stopped && !deadline.passed());
}

TEST(signals_deadlines_and_interrupts) {
  for (int i = 0; i < 50 && check_failures == 0; ++i) {
    signals_do_not_end_a_meeting(0, false);
    for (const bool crowded : {false, true}) signals_do_not_end_a_meeting(1, crowded);
  }
  for (const bool crowded : {false, true}) {
    for (const bool interrupted : {false, true}) a_deadline_ends_a_meeting(crowded, interrupted);
    an_interrupt_ends_a_meeting(1, crowded);
  }
  an_interrupt_ends_a_meeting(0, false);
}

}  // namespace
