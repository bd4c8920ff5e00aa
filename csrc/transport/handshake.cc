#include "transport/handshake.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <iterator>
#include <optional>
#include <utility>

#include "base/error.h"
#include "base/interrupts.h"
#include "base/protocol.h"
#include "base/system_call.h"
#include "transport/store.h"

namespace ringlet {
namespace {

constexpr uint32_t kMagic = 0x524e474c;  // "RNGL"

sockaddr_un abstract_address(const std::string& name) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path + 1, name.data(), std::min(name.size(), sizeof address.sun_path - 1));
  return address;
}
socklen_t address_length(const std::string& name) {
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
}

/// Repeats a system call until the deadline, if a signal or the limit of limit_sends ends it early.
template <typename SystemCall>
auto uninterrupted(const Deadline& deadline, const SystemCall& call) {
  auto result = call();
  while (result < 0 && (errno == EINTR || errno == EAGAIN) && !deadline.passed()) {
    check_interrupts();
    result = call();
  }
  return result;
}

/// Limits a send that waits for room in the socket, and a connect() that waits for a place in the peer's queue. They
/// then fail with EAGAIN.
void limit_sends(int socket) {
  constexpr timeval limit{0, std::chrono::microseconds(kInterruptCheckEvery).count()};
  ::setsockopt(socket, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
}

/// Whether bytes arrive before the deadline. `look` is called while none do.
bool readable(int socket, const Deadline& deadline, const std::function<void()>& look) {
  for (;;) {
    pollfd wait{socket, POLLIN, 0};
    const auto piece = std::min(deadline.left(), kInterruptCheckEvery);
    if (uninterrupted(deadline, [&] { return ::poll(&wait, 1, static_cast<int>(piece.count())); }) > 0) return true;
    if (deadline.passed()) return false;
    check_interrupts();
    look();
  }
}

/// A peer that fails ends its connections first, and then tells why.
void listen_for_reasons(const std::function<void()>& look) {
  constexpr std::chrono::milliseconds kPatience{500}, kPause{10};
  for (const Deadline deadline = Deadline::after(kPatience); !deadline.passed();) {
    look();
    check_interrupts();
    sleep_for(kPause);
  }
}

bool same_user(int socket) {
  ucred peer{};
  socklen_t length = sizeof peer;
  return ::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &length) == 0 && peer.uid == ::geteuid();
}

}  // namespace

struct Handshake::Hello {
  uint32_t magic;
  uint32_t version;
  int32_t rank;
  uint32_t watches_connection;  // not 0: the sender cannot watch the process
  Token token;
};

struct Handshake::Received {
  Hello hello{};
  std::vector<Descriptor> handed;
  bool cut = false;  // this process had no room for all descriptors

  void check(int rank) const {
    if (!cut) return;
    errno = EMFILE;
    throw_errno("rank " + std::to_string(rank) + " cannot take the memory of rank " + std::to_string(hello.rank),
                "raise ulimit -n, or close files");
  }
};

bool Handshake::send_hello(const Call& call, int rank, const Token& token, std::span<const int> handed,
                           const Deadline& deadline) {
  Hello hello{kMagic, kProtocol, rank, !call.process.valid(), token};
  iovec data{&hello, sizeof hello};
  alignas(cmsghdr) char space[CMSG_SPACE(Handshake::kMostHanded * sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = space;
  message.msg_controllen = CMSG_SPACE(handed.size_bytes());
  cmsghdr* rights = CMSG_FIRSTHDR(&message);
  rights->cmsg_level = SOL_SOCKET;
  rights->cmsg_type = SCM_RIGHTS;
  rights->cmsg_len = CMSG_LEN(handed.size_bytes());
  std::memcpy(CMSG_DATA(rights), handed.data(), handed.size_bytes());
  const int socket = call.connection.get();
  return uninterrupted(deadline, [&] { return ::sendmsg(socket, &message, MSG_NOSIGNAL); }) == sizeof hello;
}

std::optional<Handshake::Received> Handshake::receive_hello(int socket, size_t expected) {
  Received received;
  iovec data{&received.hello, sizeof(Hello)};
  alignas(cmsghdr) char space[CMSG_SPACE(Handshake::kMostHanded * sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = space;
  message.msg_controllen = sizeof space;
  const ssize_t bytes = repeated([&] { return ::recvmsg(socket, &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT); });
  if (const cmsghdr* rights = CMSG_FIRSTHDR(&message); rights != nullptr && rights->cmsg_type == SCM_RIGHTS) {
    for (size_t at = 0; CMSG_LEN(at + sizeof(int)) <= rights->cmsg_len; at += sizeof(int)) {
      int descriptor = -1;
      std::memcpy(&descriptor, CMSG_DATA(rights) + at, sizeof(int));
      received.handed.emplace_back(descriptor);
    }
  }
  const Hello& hello = received.hello;
  received.cut = (message.msg_flags & MSG_CTRUNC) != 0 && received.handed.size() < expected;
  if (bytes != sizeof(Hello) || hello.magic != kMagic || hello.version != kProtocol) return std::nullopt;
  if (received.handed.size() != expected && !received.cut) return std::nullopt;
  return received;
}

/// Watches the process at the other end by its pidfd, if its pid is visible here (not in another pid namespace).
Handshake::Call Handshake::opened(Descriptor connection) const {
  Call call;
  ucred peer{};
  socklen_t length = sizeof peer;
  if (::getsockopt(connection.get(), SOL_SOCKET, SO_PEERCRED, &peer, &length) == 0 && peer.pid > 0) {
    call.pid = peer.pid;
    call.process = Descriptor(static_cast<int>(::syscall(SYS_pidfd_open, peer.pid, 0)));
    if (!call.process.valid() && (errno == EMFILE || errno == ENFILE))
      throw_errno("rank " + std::to_string(rank_) + " cannot watch the process of a peer");
  }
  call.connection = std::move(connection);
  return call;
}

/// Without the process this rank watches the connection: it ends with the process, unless a forked child holds it open.
Introduced Handshake::introduced(Call call, Received received) {
  Introduced joined;
  joined.pid = call.pid;
  joined.heap = std::move(received.handed.front());
  std::move(received.handed.begin() + 1, received.handed.end(), std::back_inserter(joined.wakeups));
  if (!call.process.valid()) {
    joined.watch = std::move(call.connection);  // which stays open, so that the peer may watch it, too
    return joined;
  }
  joined.watch = std::move(call.process);
  if (received.hello.watches_connection != 0) joined.held = std::move(call.connection);
  return joined;
}

Handshake::Handshake(int rank, int world) : rank_(rank), world_(world), token_(random_token()) {
  name_ = "ringlet-";
  for (const uint8_t byte : random_token()) {
    name_ += "0123456789abcdef"[byte >> 4];
    name_ += "0123456789abcdef"[byte & 15];
  }
  listener_ = Descriptor(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  if (!listener_.valid()) throw_errno("cannot make a unix socket");
  const sockaddr_un address = abstract_address(name_);
  if (::bind(listener_.get(), reinterpret_cast<const sockaddr*>(&address), address_length(name_)) != 0 ||
      ::listen(listener_.get(), world) != 0) {
    throw_errno("cannot listen on an abstract unix socket");
  }
}

Handshake::Call Handshake::call(const Peer& peer, std::span<const int> handed, const Deadline& deadline,
                                const std::function<void()>& look) const {
  const auto fail = [&](const std::string& what, const std::string& advice = "") {
    const int error = errno;
    listen_for_reasons(look);
    errno = error;
    throw_errno("rank " + std::to_string(rank_) + what, advice);
  };
  Descriptor connection(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  if (!connection.valid()) throw_errno("cannot make a unix socket");
  const sockaddr_un address = abstract_address(peer.name);
  // Unlike on TCP, a connect() on a unix socket that a signal interrupts has no effect, so it is repeated.
  limit_sends(connection.get());
  const int connected = uninterrupted(deadline, [&] {
    return ::connect(connection.get(), reinterpret_cast<const sockaddr*>(&address), address_length(peer.name));
  });
  if (connected != 0) {
    if (errno == EINTR || errno == EAGAIN) return {};
    fail(" cannot reach a peer's unix socket",
         "check that all ranks are in one network namespace, and that none has ended; ranks of machines that were "
         "cloned while they ran count as on one host: give each machine a RINGLET_HOST_ID of its own");
  }
  Call call = opened(std::move(connection));
  if (!send_hello(call, rank_, peer.token, handed, deadline)) {
    if (errno == EINTR || errno == EAGAIN) return {};
    fail(" cannot hand its heap to a peer");
  }
  return call;
}

bool Handshake::answer(Descriptor connection, std::span<const int> handed, std::vector<Introduced>& joined,
                       const Deadline& deadline) const {
  if (!same_user(connection.get()) || !readable(connection.get(), deadline, [] {})) return false;
  std::optional<Received> received = receive_hello(connection.get(), handed.size());
  if (!received || !same(received->hello.token, token_)) return false;
  const int peer = received->hello.rank;
  if (peer <= rank_ || peer >= world_ || joined[peer].heap.valid()) return false;
  received->check(rank_);
  Call call = opened(std::move(connection));
  if (!send_hello(call, rank_, token_, handed, deadline)) return false;
  joined[peer] = introduced(std::move(call), std::move(*received));
  return true;
}

void Handshake::exchange(const std::vector<Peer>& peers, std::span<const int> handed, std::vector<Introduced>& joined,
                         const Deadline& deadline, const std::function<void()>& look) {
  std::vector<Call> calls;
  try {
    exchange_all(peers, handed, joined, calls, deadline, look);
  } catch (...) {
    for (size_t q = 0; q < calls.size(); ++q) {
      if (!calls[q].connection.valid()) continue;
      const int socket = calls[q].connection.get();
      ::shutdown(socket, SHUT_RD);  // no answer is read that arrives after this
      std::optional<Received> received = receive_hello(socket, handed.size());
      if (received && !received->cut) joined[q] = introduced(std::move(calls[q]), std::move(*received));
    }
    throw;
  }
}

void Handshake::exchange_all(const std::vector<Peer>& peers, std::span<const int> handed,
                             std::vector<Introduced>& joined, std::vector<Call>& calls, const Deadline& deadline,
                             const std::function<void()>& look) const {
  const auto fail = [&] {
    const auto missing = [&](int q) { return q != rank_ && !joined[q].heap.valid(); };
    throw Timeout(not_joined(rank_, world_, ranks_where(world_, missing)));
  };
  for (int q = 0; q < rank_; ++q) {
    calls.push_back(call(peers[q], handed, deadline, look));
    if (!calls.back().connection.valid()) fail();
  }
  for (int waiting = world_ - 1 - rank_; waiting > 0;) {
    if (!readable(listener_.get(), deadline, look)) fail();
    Descriptor connection(repeated([&] { return ::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC); }));
    if (!connection.valid() && errno != EAGAIN && errno != ECONNABORTED) {
      throw_errno("rank " + std::to_string(rank_) + " cannot take the connection of a peer");
    }
    // An unauthenticated connection that connects and says nothing costs at most this long.
    const Deadline patience = Deadline::after(std::min(deadline.left(), std::chrono::milliseconds(1000)));
    if (connection.valid() && answer(std::move(connection), handed, joined, patience)) --waiting;
    if (waiting > 0 && deadline.passed()) fail();
  }
  for (int q = 0; q < rank_; ++q) {
    const int socket = calls[q].connection.get();
    if (!readable(socket, deadline, look)) fail();
    std::optional<Received> received = receive_hello(socket, handed.size());
    if (!received || received->hello.rank != q) {
      listen_for_reasons(look);
      throw PeerLost("rank " + std::to_string(rank_) + " of " + std::to_string(world_) + ": rank " + std::to_string(q) +
                     " ended the connection through which ranks share memory: its process is gone, or runs as another "
                     "user or in another user namespace; this rank runs as user " +
                     std::to_string(::geteuid()));
    }
    received->check(rank_);
    joined[q] = introduced(std::move(calls[q]), std::move(*received));
  }
}

}  // namespace ringlet
