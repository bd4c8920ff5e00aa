// How the message engine waits, and tells of failures: what happens just between two of its steps, which the system
// calls below, the engine's own, make happen there.
#include <dlfcn.h>
#include <poll.h>
#include <sys/uio.h>

#include <cerrno>
#include <semaphore>

#include "check.h"
#include "ranks.h"

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
  if (heard.find(told) == std::string::npos) CHECK_EQ(heard, "..." + told);
}

}  // namespace

int main() {
  a_frame_at_hand_is_not_slept_upon();
  const auto abort = [](Engine& engine) { engine.abort("it was aborted"); };
  const auto fail = [](Engine& engine) { CHECK_THROWS(Timeout, engine.fail(ErrorKind::timeout, "a message is late")); };
  for (const Holder holder : {Holder::call, Holder::look}) {
    a_failure_beside_is_told(holder, abort, "rank 0 left the group");
    a_failure_beside_is_told(holder, fail, "rank 0 reported: a message is late");
  }
  return check_result("message_failure");
}
