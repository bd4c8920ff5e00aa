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
#include "base/runtime.h"
#include "transport/store.h"

namespace ringlet {
namespace {

constexpr uint32_t kMagic = 0x524e474c;  // "RNGL"
constexpr uint32_t kVersion = 1;
constexpr std::chrono::milliseconds kNow{0};

struct RegionHello {
  uint32_t magic;
  uint32_t version;
  int32_t rank;
  Token token;
};

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

/// Whether bytes arrive before the deadline.
bool readable(int socket, const Deadline& deadline) {
  for (;;) {
    pollfd wait{socket, POLLIN, 0};
    const auto piece = std::min(deadline.left(), kInterruptCheckEvery);
    if (uninterrupted(deadline, [&] { return ::poll(&wait, 1, static_cast<int>(piece.count())); }) > 0) return true;
    if (deadline.passed()) return false;
    check_interrupts();
  }
}

bool send_hello(int socket, const RegionHello& hello, std::span<const int> handed, const Deadline& deadline) {
  iovec data{const_cast<RegionHello*>(&hello), sizeof hello};
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
  return uninterrupted(deadline, [&] { return ::sendmsg(socket, &message, MSG_NOSIGNAL); }) == sizeof hello;
}

struct Received {
  RegionHello hello{};
  std::vector<Descriptor> handed;
};

std::optional<Received> receive_hello(int socket, size_t expected, const Deadline& deadline) {
  if (!readable(socket, deadline)) return std::nullopt;
  Received received;
  iovec data{&received.hello, sizeof(RegionHello)};
  alignas(cmsghdr) char space[CMSG_SPACE(Handshake::kMostHanded * sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = space;
  message.msg_controllen = sizeof space;
  const ssize_t bytes = ::recvmsg(socket, &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
  if (const cmsghdr* rights = CMSG_FIRSTHDR(&message); rights != nullptr && rights->cmsg_type == SCM_RIGHTS) {
    for (size_t at = 0; CMSG_LEN(at + sizeof(int)) <= rights->cmsg_len; at += sizeof(int)) {
      int descriptor = -1;
      std::memcpy(&descriptor, CMSG_DATA(rights) + at, sizeof(int));
      received.handed.emplace_back(descriptor);
    }
  }
  const RegionHello& hello = received.hello;
  if (bytes != sizeof(RegionHello) || hello.magic != kMagic || hello.version != kVersion ||
      received.handed.size() != expected) {
    return std::nullopt;
  }
  return received;
}

/// Watches the process at the other end by its pidfd. If its pid is not visible here (another pid namespace), this rank
/// watches the connection: it ends with the process, unless a forked child holds it open.
Introduced watched(Descriptor connection, std::vector<Descriptor> handed) {
  ucred peer{};
  socklen_t length = sizeof peer;
  Introduced joined;
  joined.heap = std::move(handed.front());
  std::move(handed.begin() + 1, handed.end(), std::back_inserter(joined.wakeups));
  if (::getsockopt(connection.get(), SOL_SOCKET, SO_PEERCRED, &peer, &length) == 0 && peer.pid > 0) {
    joined.pid = peer.pid;
    joined.watch = Descriptor(static_cast<int>(::syscall(SYS_pidfd_open, peer.pid, 0)));
  }
  if (!joined.watch.valid()) joined.watch = std::move(connection);
  return joined;
}

bool same_user(int socket) {
  ucred peer{};
  socklen_t length = sizeof peer;
  return ::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &length) == 0 && peer.uid == ::geteuid();
}

}  // namespace

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

Descriptor Handshake::call(const Peer& peer, std::span<const int> handed, const Deadline& deadline) const {
  Descriptor connection(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  if (!connection.valid()) throw_errno("cannot make a unix socket");
  const sockaddr_un address = abstract_address(peer.name);
  // Unlike on TCP, a connect() on a unix socket that a signal interrupts has no effect, so it is repeated.
  limit_sends(connection.get());
  const int connected = uninterrupted(deadline, [&] {
    return ::connect(connection.get(), reinterpret_cast<const sockaddr*>(&address), address_length(peer.name));
  });
  if (connected != 0) {
    if (errno == EINTR || errno == EAGAIN) return Descriptor();
    throw_errno("rank " + std::to_string(rank_) + " cannot reach a peer's unix socket",
                "check that all ranks are in one network namespace, and that none has ended");
  }
  if (!send_hello(connection.get(), {kMagic, kVersion, rank_, peer.token}, handed, deadline)) {
    if (errno == EINTR || errno == EAGAIN) return Descriptor();
    throw_errno("rank " + std::to_string(rank_) + " cannot hand its heap to a peer");
  }
  return connection;
}

bool Handshake::answer(Descriptor connection, std::span<const int> handed, std::vector<Introduced>& joined,
                       const Deadline& deadline) const {
  if (!same_user(connection.get())) return false;
  std::optional<Received> received = receive_hello(connection.get(), handed.size(), deadline);
  if (!received || !same(received->hello.token, token_)) return false;
  const int peer = received->hello.rank;
  if (peer <= rank_ || peer >= world_ || joined[peer].heap.valid()) return false;
  if (!send_hello(connection.get(), {kMagic, kVersion, rank_, token_}, handed, deadline)) return false;
  joined[peer] = watched(std::move(connection), std::move(received->handed));
  return true;
}

std::string Handshake::missing(const std::vector<Introduced>& joined) const {
  std::string text;
  for (int q = 0; q < world_; ++q) {
    if (q != rank_ && !joined[q].heap.valid()) text += (text.empty() ? "" : ", ") + std::to_string(q);
  }
  return text;
}

void Handshake::exchange(const std::vector<Peer>& peers, std::span<const int> handed, std::vector<Introduced>& joined,
                         const Deadline& deadline) {
  std::vector<Descriptor> calls;
  try {
    exchange_all(peers, handed, joined, calls, deadline);
  } catch (...) {
    for (size_t q = 0; q < calls.size(); ++q) {
      if (!calls[q].valid()) continue;
      ::shutdown(calls[q].get(), SHUT_RD);  // no answer is read that arrives after this
      std::optional<Received> received = receive_hello(calls[q].get(), handed.size(), Deadline::after(kNow));
      if (received) joined[q] = watched(std::move(calls[q]), std::move(received->handed));
    }
    throw;
  }
}

void Handshake::exchange_all(const std::vector<Peer>& peers, std::span<const int> handed,
                             std::vector<Introduced>& joined, std::vector<Descriptor>& calls,
                             const Deadline& deadline) const {
  const auto fail = [&] { throw Timeout(not_joined(rank_, world_, missing(joined))); };
  for (int q = 0; q < rank_; ++q) {
    calls.push_back(call(peers[q], handed, deadline));
    if (!calls.back().valid()) fail();
  }
  for (int waiting = world_ - 1 - rank_; waiting > 0;) {
    if (!readable(listener_.get(), deadline)) {
      if (deadline.passed()) fail();
      continue;
    }
    Descriptor connection(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    // An unauthenticated connection that connects and says nothing costs at most this long.
    const Deadline patience = Deadline::after(std::min(deadline.left(), std::chrono::milliseconds(1000)));
    if (connection.valid() && answer(std::move(connection), handed, joined, patience)) --waiting;
  }
  for (int q = 0; q < rank_; ++q) {
    std::optional<Received> received = receive_hello(calls[q].get(), handed.size(), deadline);
    if (!received && deadline.passed()) fail();
    if (!received || received->hello.rank != q) {
      throw PeerLost("rank " + std::to_string(rank_) + " of " + std::to_string(world_) + ": rank " + std::to_string(q) +
                     " ended the connection through which ranks share memory: its process is gone, or runs as another "
                     "user or in another user namespace; this rank runs as user " +
                     std::to_string(::geteuid()));
    }
    joined[q] = watched(std::move(calls[q]), std::move(received->handed));
  }
}

}  // namespace ringlet
