// A rank is there, whatever signals come here. Its process is killed, and a child that it forked lives on: the peer reads what was sent, then sees the end.
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <thread>

#include "mesh_group.h"

using namespace ringlet;
using namespace std::chrono_literals;

namespace {

/// The rendezvous of two processes, each at one end of a socket pair: what one sets, the other gets.
class PairStore final : public Store {
 public:
  explicit PairStore(int end) : end_(end) {}
  void set(const std::string& key, const std::string& value) override {
    own_[key] = value;
    const std::string text = key + '\n' + value;
    CHECK(::send(end_, text.data(), text.size(), 0) == static_cast<ssize_t>(text.size()));
  }
  std::string get(const std::string& key, const Deadline&) {
    if (own_.count(key) != 0) return own_[key];
    while (theirs_.count(key) == 0) {
      char text[4096];
      const ssize_t bytes = ::recv(end_, text, sizeof text, 0);
      if (bytes <= 0) throw PeerLost("the other process is gone");
      const std::string all(text, static_cast<size_t>(bytes));
      theirs_[all.substr(0, all.find('\n'))] = all.substr(all.find('\n') + 1);
    }
    return theirs_[key];
  }
  std::vector<std::string> get_all(const std::vector<std::string>& keys, const Deadline& deadline) override {
    std::vector<std::string> values;
    for (const std::string& key : keys) values.push_back(get(key, deadline));
    return values;
  }
  int64_t add(const std::string&, int64_t) override { throw ResourceError("two ends of a socket pair cannot count"); }
  bool has(const std::string& key) override { return own_.count(key) + theirs_.count(key) > 0; }
  void forget(const std::string&) override {}

 private:
  int end_;
  std::map<std::string, std::string> own_, theirs_;
};

constexpr size_t kBytes = 100'000;
constexpr int kLooks = kSanitized ? 2000 : 20'000;

std::unique_ptr<Mesh> join(int rank, PairStore& store, const Token& key, bool one_host) {
  const Deadline deadline = Deadline::after(60s);
  std::vector<std::string> addresses(2);
  store.set("address-" + std::to_string(rank), Mesh::address());
  for (int q = 0; q < 2; ++q) addresses[q] = store.get("address-" + std::to_string(q), deadline);
  return std::make_unique<Mesh>(
      Mesh::Setup{.rank = rank,
                  .world = 2,
                  .key = key,
                  .addresses = addresses,
                  .hosts = one_host ? Hosts{0, 0} : Hosts{0, 1},
                  .local = one_host ? connect_shared_memory(store, "pair", rank, 2, deadline, Rings::all) : nullptr});
}

/// The rank that will be killed: sends, forks a child that does nothing, and tells the child's pid.
[[noreturn]] void victim(int end, const Token& key, bool one_host) {
  PairStore store(end);
  const std::unique_ptr<Mesh> mesh = join(1, store, key, one_host);
  write_all(*mesh, *wait_for(*mesh, 0, ConnectionKind::collectives), pattern(kBytes, 1, 0));
  const pid_t child = ::fork();
  if (child == 0) {
    for (;;) ::pause();
  }
  store.set("child", std::to_string(child));
  for (;;) ::pause();
}

/// Looks at a living peer while another thread sends signals to this one.
void signals_end_no_look(const Mesh& mesh, const Pipe& pipe) {
  struct sigaction handled{};  // without SA_RESTART
  handled.sa_handler = [](int) {};
  CHECK(::sigaction(SIGUSR1, &handled, nullptr) == 0);
  std::atomic<bool> over{false};
  std::atomic<int> sent{0};
  std::thread striker([&over, &sent, looking = ::pthread_self()] {
    while (!over) ::pthread_kill(looking, SIGUSR1), ++sent;
  });
  bool lost = false;
  for (int looks = 0; !lost && (looks < kLooks || sent < 1000); ++looks) {
    lost = pipe.ended() || pipe.why_ended() != "has not ended" || mesh.gone(1, false);
  }
  over = true;
  striker.join();
  CHECK(!lost);
}

void see_a_killed_process(bool one_host) {
  int ends[2];
  CHECK(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) == 0);
  const Token key = random_token();
  const pid_t pid = ::fork();
  if (pid == 0) victim(ends[1], key, one_host);
  PairStore store(ends[0]);
  const std::unique_ptr<Mesh> mesh = join(0, store, key, one_host);
  Pipe* pipe = wait_for(*mesh, 1, ConnectionKind::collectives);
  const pid_t child = static_cast<pid_t>(std::stol(store.get("child", Deadline::after(60s))));
  signals_end_no_look(*mesh, *pipe);
  ::kill(pid, SIGKILL);
  CHECK(::waitpid(pid, nullptr, 0) == pid);
  CHECK(read_all(*mesh, *pipe, kBytes) == pattern(kBytes, 1, 0));
  sleep_until(*mesh, *pipe, [&] { return pipe->ended(); });
  if (one_host) CHECK_EQ(pipe->why_ended(), "its process is gone");
  ::kill(child, SIGKILL);
  ::close(ends[0]);
  ::close(ends[1]);
}

// In a process of its own: a process that has threads, as the listener's is one, had better not fork.
TEST_EACH(a_killed_process_is_seen, bool one_host, false, true) {
  const pid_t pid = ::fork();
  if (pid == 0) {
    ::alarm(120);
    see_a_killed_process(one_host);
    ::_exit(check_result(one_host ? "lost_peer, one host" : "lost_peer, TCP"));
  }
  int status = 0;
  CHECK(::waitpid(pid, &status, 0) == pid);
  CHECK_EQ(status, 0);
}

}  // namespace
