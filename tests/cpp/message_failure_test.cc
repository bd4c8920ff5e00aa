// How a group fails: the protocol of health alone, every row of its table, which needs no sockets; and the engine with
// what happens just between two of its steps, which the system calls below, the engine's own, make happen there.
#include <dlfcn.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <cerrno>
#include <cstring>
#include <semaphore>

#include "check.h"
#include "engine/health.h"
#include "engine/message/frame.h"
#include "ranks.h"
#include "transport/mesh.h"

using namespace ringlet;
using namespace std::chrono_literals;

namespace {

/// Called after each read of this thread, with the descriptor and what the read returned.
thread_local std::function<void(int, ssize_t)> after_read;
thread_local int sleeps_in_vain = 0;
thread_local std::function<void()> before_send;
/// Of this thread, whose yields take so long.
thread_local int yields = 0;
thread_local std::chrono::milliseconds yield_takes{0};
/// Called after each sleep of this thread that nothing ended, with how many there were.
thread_local std::function<void(int)> after_sleep;

template <typename Function>
Function* next_one(Function*, const char* name) {
  return reinterpret_cast<Function*>(::dlsym(RTLD_NEXT, name));
}

}  // namespace

extern "C" ssize_t readv(int descriptor, const iovec* pieces, int n) {
  static const auto real = next_one(&::readv, "readv");
  const ssize_t bytes = real(descriptor, pieces, n);
  const int error = errno;
  if (after_read) after_read(descriptor, bytes);
  errno = error;
  return bytes;
}

extern "C" int ppoll(pollfd* watched, nfds_t n, const timespec* limit, const sigset_t* mask) {
  static const auto real = next_one(&::ppoll, "ppoll");
  const int ready = real(watched, n, limit, mask);
  if (ready == 0 && (++sleeps_in_vain, after_sleep)) after_sleep(sleeps_in_vain);
  return ready;
}

extern "C" ssize_t sendmsg(int socket, const msghdr* message, int flags) {
  static const auto real = next_one(&::sendmsg, "sendmsg");
  if (before_send) before_send();
  return real(socket, message, flags);
}

extern "C" int sched_yield() noexcept {
  ++yields;
  std::this_thread::sleep_for(yield_takes);
  return 0;
}

namespace {

/// Two ranks that are connected.
struct Pair {
  Pair() {
    const Token key = random_token();
    for (int rank = 0; rank < 2; ++rank) ranks[rank] = make_engine("pair", rank, 2, Between::tcp, key);
    std::thread other([&] { broadcast(1, 0, false); });
    broadcast(0, 0, false);
    other.join();
  }

  /// One message, from `root` to the other rank.
  void broadcast(int rank, int root, bool background, std::chrono::milliseconds timeout = 60s) {
    float value = 1.0f;
    const auto bytes = reinterpret_cast<std::byte*>(&value);
    ranks[rank]->run({.collective = Collective::broadcast,
                      .dtype = DType::float32,
                      .root = root,
                      .count = 1,
                      .input = rank == root ? bytes : nullptr,
                      .output = bytes,
                      .timeout = timeout},
                     background);
  }

  std::unique_ptr<Engine> ranks[2];
};

/// The frame comes just after one of the reads that find nothing, each in turn: nobody sleeps while it is there.
TEST(a_frame_at_hand_is_not_slept_upon) {
  Pair pair;
  for (int read = 1; read <= 12; ++read) {
    std::binary_semaphore now(0);
    std::thread sender([&] {
      now.acquire();
      pair.broadcast(1, 1, false);
    });
    int empty = 0;
    after_read = [&](int socket, ssize_t bytes) {
      if (bytes >= 0 || ++empty != read) return;
      now.release();
      pollfd arrived{socket, POLLIN, 0};
      CHECK_EQ(::poll(&arrived, 1, 60'000), 1);
      sleeps_in_vain = 0;
    };
    pair.broadcast(0, 1, true);
    after_read = nullptr;
    sender.join();
    CHECK(empty >= read);
    CHECK_EQ(sleeps_in_vain, 0);
  }
}

/// As where other programs fill the processors: a rank does not yield its time away, but sleeps, and says so.
TEST(long_yields_are_few) {
  Pair pair;
  yield_takes = 10ms;
  yields = sleeps_in_vain = 0;
  CHECK_THROWS(Timeout, pair.broadcast(0, 1, false, 500ms));
  yield_takes = 0ms;
  CHECK(yields <= 4);
  CHECK(sleeps_in_vain > 0);
}

/// Its kind and its text; "" if there is none.
std::string error_of(const std::function<void()>& act) {
  try {
    act();
    return "";
  } catch (const Error& error) {
    return std::string(name(error.kind())) + ": " + error.what();
  }
}

/// A broadcast along a chain, from rank 2 to 0 to 1, which goes no further than rank 2 lets it.
struct Chain {
  static std::unique_ptr<Engine> join(int rank, const Token& key) {
    return make_engine("chain", rank, 3, Between::tcp, key);
  }
  static void run(Engine& engine, size_t count, std::chrono::milliseconds timeout) {
    std::vector<float> values(count);
    const auto bytes = reinterpret_cast<std::byte*>(values.data());
    engine.run({.collective = Collective::broadcast,
                .algorithm = find_algorithm(Collective::broadcast, "chain"),
                .dtype = DType::float32,
                .root = 2,
                .count = count,
                .input = bytes,
                .output = bytes,
                .timeout = timeout},
               false);
  }
  /// Rank 0 waits, and `slept` hears how often it has slept for 20 ms in vain.
  void wait_in_rank_0(size_t count, const std::function<void(int)>& slept) {
    zero = std::jthread([this, count, slept] {
      sleeps_in_vain = 0;
      after_sleep = slept;
      CHECK_THROWS(Timeout, run(*ranks[0], count, 20s));
      after_sleep = nullptr;
    });
  }

  const Token key = random_token();
  std::unique_ptr<Engine> ranks[3] = {join(0, key), nullptr, join(2, key)};
  std::jthread zero;  // if a check fails, its words are told, and not that a thread was left
};

constexpr auto kHears = kSanitized ? 5s : 1s;  // what rank 1 gets to hear of it
constexpr char kStuck[] = "furthest behind is rank 2, which ";

/// Rank 1 hears for whom rank 0 waits, also if it connects after that was said.
TEST(a_suspicion_reaches_a_rank_that_connects_later) {
  Chain chain;
  std::binary_semaphore has_waited(0);
  chain.wait_in_rank_0(1, [&](int sleeps) {
    if (sleeps == 10) has_waited.release();  // long after it has said so
  });
  has_waited.acquire();
  chain.ranks[1] = Chain::join(1, chain.key);
  CHECK_HAS(CHECK_THROWS(Timeout, Chain::run(*chain.ranks[1], 1, kHears)), kStuck);
  chain.zero.join();
}

/// Also if data came after that was said, and rank 0 then waits again.
TEST(a_suspicion_is_repeated_after_data) {
  constexpr size_t kCount = 1 << 20;  // several segments
  Chain chain;
  chain.ranks[1] = Chain::join(1, chain.key);
  std::counting_semaphore<> sends(0);
  chain.wait_in_rank_0(kCount, [&](int sleeps) {
    if (sleeps == 10 || sleeps == 20) sends.release();
  });
  std::jthread two([&] {
    before_send = [&] { sends.acquire(); };
    try {
      Chain::run(*chain.ranks[2], kCount, 20s);
    } catch (const Timeout&) {  // or all is written
    }
    before_send = nullptr;
  });
  const std::string heard = error_of([&] { Chain::run(*chain.ranks[1], kCount, 2 * kHears); });
  sends.release(1000);
  CHECK_HAS(heard, std::string(name(ErrorKind::timeout)), kStuck);
  chain.zero.join();
  two.join();
}

/// The health of rank 0 of 4 in its call number 7, with an engine that waits for rank 1 and only writes down what it is
/// to send.
class Alone final : public Health::Carrier {
 public:
  using Kind = Health::Report::Kind;
  using State = Health::State;

  Alone() {
    waiting.timeout = kTimeout;
    waiting.awaits = [this](int peer) { return peer == waited_for; };
    waiting.straggler = [this] { return health.straggler(waited_for); };
    waiting.context = [] { return "rank 0"; };
    health.begin_call(7);
  }

  void error(int peer, ErrorKind kind, uint64_t call, int origin, std::string_view text) {
    health.on_report(peer, {.kind = Kind::error, .error = kind, .origin = origin, .call = call, .text = text});
  }
  void waits(int peer, Suspect suspect) {
    health.on_report(peer, {.kind = Kind::waiting, .call = 7, .suspect = suspect, .text = "a call"});
  }
  void goodbye(int peer) { health.on_report(peer, {.kind = Kind::goodbye}); }
  void idle(std::chrono::milliseconds waited) { health.examine(waiting, Health::Look::ends, waiting.began + waited); }
  State state() const { return health.state(); }

  bool send(const Health::Report& report) noexcept override {
    const bool final = report.kind == Kind::error || report.kind == Kind::goodbye;
    CHECK(!final || std::exchange(told, true) || !health.failed());  // the peers are told before this rank raises it
    if (sending) std::exchange(sending, nullptr)();
    if (report.kind == Kind::waiting) {
      said.push_back(report.suspect.rank);
    } else if (report.kind == Kind::error) {
      posted.push_back(std::to_string(report.origin) + ": " + std::string(report.text));
    } else {
      posted.push_back("goodbye");
    }
    return true;
  }
  void stop() noexcept override { stopped = posted.size(); }
  void poll(Health::Look) override {
    if (arriving) std::exchange(arriving, nullptr)();
  }

  static constexpr auto kTimeout = 1s;
  int waited_for = 1;
  std::function<void()> arriving;   // what the next look for reports finds
  std::function<void()> sending;    // while the next report goes out
  std::vector<int> said;            // whom it suspects
  std::vector<std::string> posted;  // last words
  size_t stopped = 0;
  bool told = false;
  CallLog calls;
  Waiting waiting;
  Health health{0, 4, calls, *this, /*over_network=*/true};
};

TEST(a_suspicion_is_passed_on) {
  Alone rank;
  rank.idle(40ms);
  CHECK(rank.said.empty());
  rank.idle(60ms);
  rank.idle(70ms);
  CHECK(rank.said == std::vector{1});  // once
  rank.waits(1, {3, false});
  rank.idle(80ms);
  CHECK(rank.said == (std::vector{1, 3}));
  CHECK_HAS(CHECK_THROWS(Timeout, rank.idle(Alone::kTimeout)),
            "furthest behind is rank 3, which has not made this call");
  CHECK(rank.state() == Health::State::failed);
  CHECK_EQ(rank.stopped, 1u);
  CHECK_HAS(rank.posted[0], "0: rank 0: Timed out");
}

TEST(a_suspicion_ends) {
  Alone rank;
  rank.waits(1, {3, true});
  rank.idle(60ms);
  rank.health.on_data(1, 7);
  rank.health.on_message(1);  // rank 1 waits no longer
  rank.idle(70ms);
  CHECK(rank.said == (std::vector{3, 1}));
  rank.health.end_call();
  CHECK(rank.said == (std::vector{3, 1, -1}));
  Alone quick;
  quick.health.end_call();
  CHECK(quick.said.empty());
}

/// What a rank does at an event: what it sends, and what it raises.
struct Done {
  std::vector<std::string> sent;
  std::string raised;
  Health::State state;
};

Done done_at(Alone& rank, Health::Event event) {
  using Event = Health::Event;
  Done done;
  rank.posted.clear();
  try {
    switch (event) {
      case Event::error:
        rank.error(2, ErrorKind::timeout, 7, 3, "the error");
        rank.idle(1ms);
        break;
      case Event::later_error:
        rank.error(2, ErrorKind::timeout, 8, 3, "a later error");
        if (!rank.health.failed()) rank.idle(1ms);
        break;
      case Event::goodbye: rank.goodbye(2); break;
      case Event::lost:
        rank.health.on_closed(3, false, "lost");
        rank.idle(1ms);
        break;
      case Event::late: rank.idle(Alone::kTimeout); break;
      case Event::own_error: rank.health.fail(ErrorKind::device_error, "its own error");
      case Event::abort: rank.health.abort("the abort"); break;
      case Event::call:
        rank.health.end_call();
        rank.health.enter_call();
        break;
      case Event::leave: rank.health.leave(); break;
    }
  } catch (const Error& error) {
    done.raised = error.what();
  }
  done.sent = rank.posted;
  done.state = rank.state();
  return done;
}

/// Every row of the protocol, from a rank that came to the row's state by other rows.
TEST(the_table_holds) {
  using State = Health::State;
  using Event = Health::Event;
  using Act = Health::Act;
  for (const Health::Transition& row : Health::transitions()) {
    const std::string name =
        "row " + std::to_string(static_cast<int>(row.from)) + ", " + std::to_string(static_cast<int>(row.event));
    for (const bool failed_before : {false, true}) {
      Alone rank;
      if (row.from == State::warned) done_at(rank, Event::later_error);
      if (row.from == State::failed || (row.from == State::left && failed_before)) done_at(rank, Event::abort);
      if (row.from == State::left) done_at(rank, Event::leave);
      CHECK(rank.state() == row.from);
      const bool kept = rank.health.failed();
      const Done done = done_at(rank, row.event);
      CHECK_EQ(name + (done.state == row.to ? "" : ": another state"), name);
      const std::string own = row.event == Event::lost   ? "ended (lost)"
                              : row.event == Event::late ? "Timed out"
                                                         : "its own error";
      const auto says = [&](const std::string& text, const std::string& part) {
        if (text.find(part) == std::string::npos) CHECK_EQ(name + ": " + text, "..." + part);
      };
      const bool in_a_wait = row.event == Event::error || row.event == Event::lost || row.event == Event::late;
      if (kept && in_a_wait) {  // a wait raises the first error, whatever it would find
        says(done.raised, "the abort");
        CHECK(done.sent.empty());
        continue;
      }
      switch (row.act) {
        case Act::nothing:
        case Act::note:
          if (row.event != Event::lost) CHECK_EQ(name + done.raised, name);
          if (row.event != Event::lost) CHECK(done.sent.empty());
          break;
        case Act::report:
          says(done.raised, own);
          CHECK_EQ(done.sent.size(), 1u);
          says(done.sent.at(0), "0: ");
          break;
        case Act::forward:
          says(done.raised, row.from == State::warned ? "rank 3 reported: " : "rank 3 reported: the error");
          CHECK_EQ(done.sent.size(), 1u);
          says(done.sent.at(0), "3: ");
          break;
        case Act::raise_first:
          says(done.raised, kept ? "the abort" : "");
          CHECK(done.sent.empty());
          break;
        case Act::say_goodbye:
          CHECK_EQ(done.raised, std::string());
          CHECK(done.sent == std::vector<std::string>{"goodbye"});
          break;
      }
    }
  }
}

TEST(a_report_of_a_later_call_can_wait) {
  Alone rank;
  rank.error(2, ErrorKind::timeout, /*call=*/8, /*origin=*/3, "too late");
  CHECK(rank.state() == Health::State::warned);
  rank.idle(1ms);  // it needs nothing of rank 2
  rank.health.end_call();
  CHECK_HAS(CHECK_THROWS(Timeout, rank.health.enter_call()), "rank 3 reported: too late");
  CHECK(rank.state() == Health::State::failed);
  CHECK_EQ(rank.posted.back(), "3: too late");  // as rank 3 said it
  CHECK_HAS(CHECK_THROWS(Timeout, rank.health.enter_call()), "this group failed before");
  CHECK_EQ(rank.posted.size(), 1u);
}

TEST(an_end_is_a_failure_if_the_call_needs_the_peer) {
  Alone rank;
  rank.goodbye(2);
  rank.health.on_closed(2, false, "end of file");
  rank.idle(1ms);
  CHECK(rank.state() == Health::State::healthy);
  rank.health.on_closed(3, false, "reset");
  CHECK_HAS(CHECK_THROWS(PeerLost, rank.idle(1ms)), "connection to rank 3 ended (reset)");
  Alone waiting;
  waiting.goodbye(1);
  CHECK_HAS(CHECK_THROWS(PeerLost, waiting.idle(1ms)), "rank 1 left the group");
  Alone unmapped;
  unmapped.health.on_closed(3, true, "");
  CHECK_HAS(CHECK_THROWS(InvalidUsage, unmapped.idle(1ms)), "memory of this call's tensor is gone");
  Alone told;  // another peer knows why
  told.health.on_closed(3, false, "reset");
  told.arriving = [&] { told.arriving = [&] { told.error(2, ErrorKind::device_error, 8, 2, "a bad GPU"); }; };
  try {
    told.idle(1ms);
    CHECK(!"rank 3 is gone");
  } catch (const DeviceError& error) {
    CHECK_HAS(error.what(), "rank 2 reported: a bad GPU");
    CHECK(error.reported());
  }
}

/// What a wait is for may have come before its peer left, or before its deadline.
TEST(a_wait_looks_once_more_before_it_fails) {
  for (const bool there : {true, false}) {
    Alone rank;
    rank.waiting.reached = [&] { return there; };
    const auto ends_well = [&](std::chrono::milliseconds waited) {
      try {
        rank.idle(waited);
        return true;
      } catch (const Error&) {
        return false;
      }
    };
    rank.goodbye(1);
    CHECK_EQ(ends_well(1ms), there);
    CHECK_EQ(ends_well(Alone::kTimeout), there);
    rank.error(2, ErrorKind::timeout, 7, 2, "too late");
    CHECK_EQ(ends_well(1ms), there);
  }
}

TEST(waits_that_cross_are_named) {
  Alone rank;
  rank.waiting.message = true;
  rank.waiting.peer = 1;
  rank.waiting.awaits = [](int) { return false; };
  rank.waiting.straggler = nullptr;
  rank.arriving = nullptr;
  rank.waits(1, {});
  rank.waits(2, {});
  rank.health.on_report(3, {.kind = Alone::Kind::in_message, .text = "a message"});
  const std::string error = CHECK_THROWS(Timeout, rank.idle(Alone::kTimeout));
  CHECK_HAS(error, "for rank 1; waiting as well: a call; waiting as well: a message; it may be");
}

TEST(an_abort_says_goodbye) {
  Alone rank;
  rank.health.abort("enough");
  CHECK(rank.posted == std::vector<std::string>{"goodbye"});
  CHECK_EQ(rank.stopped, 1u);
  CHECK_EQ(CHECK_THROWS(PeerLost, rank.idle(1ms)), "enough");
  rank.health.leave();
  CHECK(rank.state() == Health::State::left);
}

/// Peers leave as soon as they are told, and another thread of this rank may see that first.
TEST(what_the_peers_were_told_is_what_all_threads_raise) {
  Alone looking;
  looking.arriving = [&] {
    looking.health.poison(ErrorKind::timeout, "the first");
    looking.goodbye(1);
  };
  CHECK_EQ(error_of([&] { looking.idle(1ms); }).substr(0, 18), "Timeout: the first");
  Alone telling;
  std::string raised;
  std::jthread other;
  std::binary_semaphore looks(0);
  telling.arriving = [&] { looks.release(); };
  telling.sending = [&] {
    telling.goodbye(1);
    other = std::jthread([&] { raised = error_of([&] { telling.idle(1ms); }); });
    looks.acquire();
    std::this_thread::sleep_for(20ms);  // in which it would raise what it has seen
  };
  telling.health.poison(ErrorKind::timeout, "the first");
  other.join();
  CHECK_EQ(raised.substr(0, 18), "Timeout: the first");
}

enum class Holder { call, look };

/// Another thread of rank 0 fails while rank 0 moves bytes, which ends before it notices: rank 1 hears of it all the
/// same.
void tell_a_failure_beside(Holder holder, const std::function<void(Engine&)>& failing, const std::string& told) {
  Pair pair;
  std::string heard;
  std::binary_semaphore awaited(0);
  std::jthread peer([&] {
    if (holder == Holder::call) {
      awaited.acquire();  // what lies there before the call is read before it begins, and then the call would fail
      pair.broadcast(1, 1, false);
    }
    heard = error_of([&] { pair.broadcast(1, 0, false, 10s); });
  });
  bool waits = false;
  bool failed = false;
  after_read = [&](int, ssize_t bytes) {
    if (!std::exchange(waits, true)) awaited.release();
    if (failed || (holder == Holder::call && bytes <= 0)) return;
    failed = true;
    std::thread([&] { failing(*pair.ranks[0]); }).join();
  };
  const auto moves = [&] {
    holder == Holder::call ? pair.broadcast(0, 1, false) : pair.ranks[0]->health().poll_failures();
  };
  CHECK_EQ(error_of(moves), "");
  after_read = nullptr;
  peer.join();
  CHECK(failed);
  CHECK_HAS(heard, told);
}

/// A peer is gone in the middle of a report: the call sees the end of the pipe, and does not wait for its deadline.
void cut_a_report_short(FrameKind kind, size_t of_text) {
  const Token key = random_token();
  const std::unique_ptr<Engine> rank = make_engine("cut short", 0, 2, Between::tcp, key);
  Mesh peer({.rank = 1, .world = 2, .key = key, .addresses = {Mesh::address(), Mesh::address()}, .hosts = {0, 1}});
  Pipe* pipe = nullptr;
  while ((pipe = peer.open(0, ConnectionKind::collectives)) == nullptr) std::this_thread::sleep_for(1ms);
  FrameHeader header;
  header.kind = kind;
  header.bytes = 100;
  header.detail = static_cast<int64_t>(ErrorKind::resource_error);
  header.index = 1;
  std::vector<std::byte> bytes(sizeof header + of_text);
  std::memcpy(bytes.data(), &header, sizeof header);
  const iovec piece{bytes.data(), bytes.size()};
  CHECK_EQ(pipe->write(&piece, 1), bytes.size());
  peer.close(Deadline::after(1s));
  float value = 0.0f;
  Call call{.collective = Collective::broadcast, .dtype = DType::float32, .root = 1, .count = 1};
  call.output = reinterpret_cast<std::byte*>(&value);
  call.timeout = 10s;
  CHECK_HAS(CHECK_THROWS(PeerLost, rank->run(call, false)), "the connection to rank 1 ended");
}

TEST(a_report_cut_short_is_the_end_of_its_pipe) {
  for (const FrameKind kind : {FrameKind::error, FrameKind::in_message}) {
    for (const size_t of_text : {0, 10, 99}) cut_a_report_short(kind, of_text);
  }
}

TEST_EACH(a_failure_beside_is_told, Holder holder, Holder::call, Holder::look) {
  const auto abort = [](Engine& engine) { engine.health().abort("it was aborted"); };
  const auto fail = [](Engine& engine) {
    CHECK_THROWS(Timeout, engine.health().fail(ErrorKind::timeout, "a message is late"));
  };
  tell_a_failure_beside(holder, abort, "rank 0 left the group");
  tell_a_failure_beside(holder, fail, "rank 0 reported: a message is late");
}

}  // namespace
