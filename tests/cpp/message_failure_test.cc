// How the message engine waits, and tells of failures: the protocol alone, which needs no sockets; and the engine with
// what happens just between two of its steps, which the system calls below, the engine's own, make happen there.
#include <dlfcn.h>
#include <poll.h>
#include <sys/uio.h>

#include <cerrno>
#include <cstring>
#include <semaphore>

#include "check.h"
#include "engine/message/failure_protocol.h"
#include "ranks.h"
#include "transport/mesh.h"

using namespace ringlet;
using namespace std::chrono_literals;

namespace {

/// Called after each read of this thread, with the descriptor and what the read returned.
thread_local std::function<void(int, ssize_t)> after_read;
thread_local int sleeps_in_vain = 0;

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
  if (ready == 0) ++sleeps_in_vain;
  return ready;
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
void a_frame_at_hand_is_not_slept_upon() {
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

/// The protocol of rank 0 of 4 in its call number 7, with an engine that waits for rank 1 and only writes down what it
/// is to send.
class Alone final : public FailureProtocol::Owner {
 public:
  Alone() {
    FrameHeader call;
    call.call = 7;
    protocol.begin_call(call, kTimeout, began);
  }

  /// A frame of that peer in its call number `call`.
  void report(int peer, FrameKind kind, int64_t detail, uint64_t call = 7, uint32_t index = 0, std::string text = "") {
    FrameHeader header;
    header.kind = kind;
    header.detail = detail;
    header.call = call;
    header.index = index;
    protocol.on_report(peer, header, text);
  }
  void idle(std::chrono::milliseconds waited) { protocol.on_idle(began + waited); }
  FailureProtocol::State state() const { return protocol.state(); }

  std::string context() const override { return "rank 0"; }
  bool awaits(int peer) const override { return peer == waited_for; }
  int awaited() const override { return waited_for; }
  const FrameHeader* frame_ahead(int) override { return nullptr; }
  void read_reports() override {
    if (arriving) std::exchange(arriving, nullptr)();
  }
  void poll_peers() override { read_reports(); }
  void say(const FrameHeader& header, const std::string&) override {
    CHECK(header.kind == FrameKind::waiting);
    said.push_back(static_cast<int>(header.detail));
  }
  void post(const FrameHeader& header, const std::string& text) noexcept override {
    posted.push_back(header.kind == FrameKind::error ? std::to_string(header.index) + ": " + text : "goodbye");
  }
  void flush() noexcept override { flushed = posted.size(); }

  static constexpr auto kTimeout = 1s;
  const FailureProtocol::Clock::time_point began = FailureProtocol::Clock::now();
  int waited_for = 1;
  std::function<void()> arriving;   // what the next look for reports finds
  std::vector<int> said;            // whom it suspects
  std::vector<std::string> posted;  // last words
  size_t flushed = 0;
  CallLog calls;
  FailureProtocol protocol{0, 4, calls, *this};
};

void contains(const std::string& text, const std::string& part) {
  if (text.find(part) == std::string::npos) CHECK_EQ(text, "..." + part);
}

void a_suspicion_is_passed_on() {
  Alone rank;
  rank.idle(40ms);
  CHECK(rank.said.empty());
  rank.idle(60ms);
  rank.idle(70ms);
  CHECK(rank.said == std::vector{1});  // once
  rank.report(1, FrameKind::waiting, 3);
  rank.idle(80ms);
  CHECK(rank.said == (std::vector{1, 3}));
  contains(CHECK_THROWS(Timeout, rank.idle(Alone::kTimeout)),
           "furthest behind is rank 3, which has not made this call");
  CHECK(rank.state() == FailureProtocol::State::failed);
  CHECK_EQ(rank.flushed, 1u);
  contains(rank.posted[0], "0: rank 0: Timed out");
}

void a_suspicion_ends() {
  Alone rank;
  rank.report(1, FrameKind::waiting, 3, 7, 1);
  rank.idle(60ms);
  rank.protocol.on_data(1, 7);
  rank.protocol.on_message(1);  // rank 1 waits no longer
  rank.idle(70ms);
  CHECK(rank.said == (std::vector{3, 1}));
  rank.protocol.end_call();
  CHECK(rank.said == (std::vector{3, 1, -1}));
  Alone quick;
  quick.protocol.end_call();
  CHECK(quick.said.empty());
}

void a_report_of_a_later_call_can_wait() {
  Alone rank;
  rank.report(2, FrameKind::error, static_cast<int64_t>(ErrorKind::timeout), /*call=*/8, /*index=*/3, "too late");
  CHECK(rank.state() == FailureProtocol::State::warned);
  rank.idle(1ms);  // it needs nothing of rank 2
  rank.protocol.end_call();
  contains(CHECK_THROWS(Timeout, rank.protocol.enter_call()), "rank 3 reported: too late");
  CHECK(rank.state() == FailureProtocol::State::failed);
  CHECK_EQ(rank.posted.back(), "3: too late");  // as rank 3 said it
  contains(CHECK_THROWS(Timeout, rank.protocol.enter_call()), "this group failed before");
  CHECK_EQ(rank.posted.size(), 1u);
}

void a_report_of_this_call_ends_it() {
  Alone rank;
  const auto kind = static_cast<int64_t>(ErrorKind::invalid_usage);
  contains(CHECK_THROWS(InvalidUsage, rank.report(2, FrameKind::error, kind, 7, 2, "no")), "rank 2 reported: no");
  Alone unmoved;
  unmoved.report(2, FrameKind::error, 99);  // of no known kind
  CHECK(unmoved.state() == FailureProtocol::State::healthy);
}

void an_end_is_a_failure_if_the_call_needs_the_peer() {
  Alone rank;
  rank.report(2, FrameKind::goodbye, 0);
  rank.protocol.on_closed(2, false, "end of file");
  CHECK(rank.state() == FailureProtocol::State::healthy);
  contains(CHECK_THROWS(PeerLost, rank.protocol.on_closed(3, false, "reset")), "connection to rank 3 ended (reset)");
  Alone waiting;
  waiting.report(1, FrameKind::goodbye, 0);
  contains(CHECK_THROWS(PeerLost, waiting.idle(1ms)), "rank 1 left the group");
  Alone unmapped;
  contains(CHECK_THROWS(InvalidUsage, unmapped.protocol.on_closed(3, true, "")),
           "memory of this call's tensor is gone");
  Alone told;  // another peer knows why
  told.arriving = [&] {
    told.report(2, FrameKind::error, static_cast<int64_t>(ErrorKind::device_error), 8, 2, "a bad GPU");
  };
  contains(CHECK_THROWS(DeviceError, told.protocol.on_closed(3, false, "reset")), "rank 2 reported: a bad GPU");
}

void an_abort_says_goodbye() {
  Alone rank;
  rank.protocol.abort("enough");
  CHECK(rank.posted == std::vector<std::string>{"goodbye"});
  CHECK_EQ(rank.flushed, 1u);
  CHECK_EQ(CHECK_THROWS(PeerLost, rank.idle(1ms)), "enough");
  rank.protocol.leave();
  CHECK(rank.state() == FailureProtocol::State::left);
}

enum class Holder { call, look };

/// Another thread of rank 0 fails while rank 0 moves bytes, which ends before it notices: rank 1 hears of it all the
/// same.
void a_failure_beside_is_told(Holder holder, const std::function<void(Engine&)>& failing, const std::string& told) {
  Pair pair;
  std::string heard;
  std::thread peer([&] {
    if (holder == Holder::call) pair.broadcast(1, 1, false);
    try {
      pair.broadcast(1, 0, false, 10s);
    } catch (const Error& error) {
      heard = std::string(name(error.kind())) + ": " + error.what();
    }
  });
  bool failed = false;
  after_read = [&](int, ssize_t bytes) {
    if (failed || (holder == Holder::call && bytes <= 0)) return;
    failed = true;
    std::thread([&] { failing(*pair.ranks[0]); }).join();
  };
  holder == Holder::call ? pair.broadcast(0, 1, false) : pair.ranks[0]->poll_failures();
  after_read = nullptr;
  peer.join();
  CHECK(failed);
  contains(heard, told);
}

/// A peer is gone in the middle of a report: the call sees the end of the pipe, and does not wait for its deadline.
void a_report_cut_short_is_the_end_of_its_pipe(FrameKind kind, size_t of_text) {
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
  const std::string error = CHECK_THROWS(PeerLost, rank->run(call, false));
  CHECK(error.find("the connection to rank 1 ended") != std::string::npos);
}

}  // namespace

int main() {
  for (const FrameKind kind : {FrameKind::error, FrameKind::in_message}) {
    for (const size_t of_text : {0, 10, 99}) a_report_cut_short_is_the_end_of_its_pipe(kind, of_text);
  }
  a_suspicion_is_passed_on();
  a_suspicion_ends();
  a_report_of_a_later_call_can_wait();
  a_report_of_this_call_ends_it();
  an_end_is_a_failure_if_the_call_needs_the_peer();
  an_abort_says_goodbye();
  a_frame_at_hand_is_not_slept_upon();
  const auto abort = [](Engine& engine) { engine.abort("it was aborted"); };
  const auto fail = [](Engine& engine) { CHECK_THROWS(Timeout, engine.fail(ErrorKind::timeout, "a message is late")); };
  for (const Holder holder : {Holder::call, Holder::look}) {
    a_failure_beside_is_told(holder, abort, "rank 0 left the group");
    a_failure_beside_is_told(holder, fail, "rank 0 reported: a message is late");
  }
  return check_result("message_failure");
}
