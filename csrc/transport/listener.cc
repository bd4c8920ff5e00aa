#include "transport/listener.h"

#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <new>
#include <optional>

#include "base/process.h"
#include "base/start_thread.h"
#include "base/system_call.h"
#include "transport/congestion.h"
#include "transport/transport.h"

namespace ringlet {
namespace {

using namespace std::chrono_literals;

constexpr size_t kMostUnauthenticated = 128;  ///< connections at once that have not named the listener
constexpr size_t kNamed = 512;                // connections that have named it, without a proof
constexpr size_t kDeparted = 256;
constexpr size_t kLeaving = 256;
constexpr auto kGoodbyeTime = 2s;  ///< what a peer gets to read the final error of a rank that has left
constexpr int kBacklog = 4096;     // the kernel takes the smaller of this and net.core.somaxconn
constexpr int kAtOnce = 256;       // connections to accept before the thread serves the others
constexpr auto kRest = 100ms;

Socket listen_at(int family, sockaddr* address, socklen_t length) {
  Socket listener(::socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!listener.valid()) return Socket();
  const int off = 0;
  if (family == AF_INET6) ::setsockopt(listener.get(), IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
  use_congestion_control(listener.get());
  if (::bind(listener.get(), address, length) != 0 || ::listen(listener.get(), kBacklog) != 0) return Socket();
  return listener;
}

/// Listens at all addresses and a free port: for IPv6 and IPv4, if the machine has both.
Socket listen_anywhere() {
  congestion_control();  // may throw
  sockaddr_in6 both{};
  both.sin6_family = AF_INET6;
  Socket listener = listen_at(AF_INET6, reinterpret_cast<sockaddr*>(&both), sizeof both);
  if (listener.valid()) return listener;
  sockaddr_in v4{};
  v4.sin_family = AF_INET;
  listener = listen_at(AF_INET, reinterpret_cast<sockaddr*>(&v4), sizeof v4);
  if (!listener.valid()) throw_errno("cannot listen on a TCP port");
  return listener;
}

uint16_t port_of(const Socket& listener) {
  sockaddr_in6 address{};  // the port is at the same place in both families
  socklen_t length = sizeof address;
  if (::getsockname(listener.get(), reinterpret_cast<sockaddr*>(&address), &length) != 0) throw_errno("getsockname");
  return ntohs(address.sin6_port);
}

std::string chosen_interfaces() {
  for (const char* name : {"RINGLET_INTERFACE", "GLOO_SOCKET_IFNAME"}) {
    if (const char* value = std::getenv(name)) return value;
  }
  return "";
}

/// The kind that a peer has named; none if there is no such kind.
std::optional<ConnectionKind> kind_of(const Hello& hello) {
  if (hello.which >= std::size(kConnectionKinds)) return std::nullopt;
  return static_cast<ConnectionKind>(hello.which);
}

/// Whether both join the same ranks for the same purpose, whichever end connected.
bool same_pair(const Connector& own, const Hello& theirs) {
  const Connector::Target& call = own.target();
  return kind_of(theirs) == call.which && call.from == theirs.to && call.to == theirs.from &&
         group_name(call.key) == theirs.group;
}

}  // namespace

Listener& Listener::process() {
  struct Shared {
    std::mutex mutex;
    std::unique_ptr<Listener> listener;  // its thread runs as long as the process
  };
  static constinit OfProcess<Shared> of_process;
  Shared& shared = of_process.get();
  const std::lock_guard lock(shared.mutex);
  if (!shared.listener) {
    auto made = std::unique_ptr<Listener>(new Listener);
    start_thread("TCP connections", [listens = made.get()] { listens->run(); }).detach();
    shared.listener = std::move(made);
  }
  return *shared.listener;
}

Listener::Listener() : owner_(this_process()), listener_(listen_anywhere()), wakeup_(make_wakeup()) {
  const Token noise = random_token();
  std::copy_n(noise.begin(), sizeof own_.listener, reinterpret_cast<uint8_t*>(&own_.listener));
  own_.host = host_identity();
  own_.port = port_of(listener_);
}

PeerAddress Listener::address(const std::string& store) const {
  PeerAddress address = own_;
  address.addresses = own_addresses(chosen_interfaces(), store);
  if (address.addresses.empty()) {
    throw ResourceError(
        "no network interface of this host is up, so no rank could reach this one over TCP: bring one up (inside one "
        "host \"ip link set lo up\" will do), or choose transport=\"shared_memory\" for ranks of one host");
  }
  return address;
}

void Listener::enter(const Token& key, int rank, const std::shared_ptr<Resident>& resident) {
  {
    const std::lock_guard lock(mutex_);
    const MemberId id{group_name(key), static_cast<uint32_t>(rank)};
    Entry entry{{key, resident}, {}};
    entry.departed.push_back({id, key, {}});
    if (!members_.emplace(id, std::move(entry)).second) {
      throw InvalidUsage("rank " + std::to_string(rank) +
                         " of one group was made twice in this process: make each rank once");
    }
    stirred_ = true;
  }
  wake();
}

void Listener::leave(const Token& key, int rank, Bytes final_frame) noexcept {
  if (owner_ != this_process()) return;  // a forked child's copy of a group; its parent's is still in use
  {
    const std::lock_guard lock(mutex_);
    const auto found = members_.find({group_name(key), static_cast<uint32_t>(rank)});
    if (found != members_.end()) {
      found->second.departed.front().final_frame = std::move(final_frame);
      departed_.splice(departed_.end(), found->second.departed);
      members_.erase(found);
    }
    if (departed_.size() > kDeparted) departed_.pop_front();
    stirred_ = true;
  }
  wake();
}

void Listener::connect_to(Connector::Target call) {
  {
    const std::lock_guard lock(mutex_);
    calls_.emplace_back(std::move(call));
  }
  wake();
}

void Listener::wake() noexcept { signal_wakeup(wakeup_.get()); }

Listener::Member Listener::member(const MemberId& id) {
  const std::lock_guard lock(mutex_);
  const auto found = members_.find(id);
  return found == members_.end() ? Member{} : found->second.member;
}

std::optional<Listener::Departed> Listener::departed(const MemberId& id) {
  const std::lock_guard lock(mutex_);
  const auto found = std::find_if(departed_.begin(), departed_.end(), [&](const auto& each) { return each.id == id; });
  return found == departed_.end() ? std::nullopt : std::optional(*found);
}

/// Sends the connection away if the rank that it asks for has left the group. Returns whether it did.
bool Listener::turn_away(IncomingConnection& incoming) {
  const Hello& hello = incoming.hello();
  const std::optional<Departed> gone = departed({hello.group, hello.to});
  if (!gone) return false;
  if (!incoming.proves(gone->key)) return true;
  if (gone->final_frame.empty() || kind_of(hello) != ConnectionKind::collectives) {
    incoming.send_away(gone->key);
  } else {
    part(incoming.welcome(gone->key), gone->final_frame);
  }
  return true;
}

/// Sends the final error. If the connection were closed while the peer still writes, it would be reset, and the final
/// error could be lost.
void Listener::part(Socket socket, const Bytes& final_frame) {
  if (!socket.valid()) return;
  repeated([&] { return ::send(socket.get(), final_frame.data(), final_frame.size(), MSG_NOSIGNAL | MSG_DONTWAIT); });
  ::shutdown(socket.get(), SHUT_WR);
  draining_.push_back({std::move(socket), Deadline::after(kGoodbyeTime)});
  if (draining_.size() > kLeaving) draining_.pop_front();
}

void Listener::close_departed() {
  std::erase_if(draining_, [](const Draining& each) { return !each.socket.discard() || each.deadline.passed(); });
}

/// What memory runs out for is lost, as if the network had lost it: a connection, or one look at all of them.
void Listener::run() {
  ::pthread_setname_np(::pthread_self(), "ringlet-tcp");
  for (;;) {
    try {
      wait();
      take_calls();
      poll_incoming();
      poll_connectors();
      close_departed();
    } catch (const std::bad_alloc&) {
      reconsider_ = true;
      sleep_for(kRest);
    }
  }
}

void Listener::take_calls() {
  const std::lock_guard lock(mutex_);
  connectors_.splice(connectors_.end(), calls_);
  reconsider_ = reconsider_ || std::exchange(stirred_, false);
}

void Listener::wait() {
  std::vector<pollfd> watched{{wakeup_.get(), POLLIN, 0}, {resting_ ? -1 : listener_.get(), POLLIN, 0}};
  auto left = resting_ ? kRest : std::chrono::milliseconds(1h);
  for (const IncomingConnection& each : incoming_) {
    watched.push_back({each.descriptor(), POLLIN, 0});
    left = std::min(left, each.deadline().left());
  }
  for (const Connector& each : connectors_) {
    each.watch(watched);
    left = std::min(left, each.left());
  }
  for (const Draining& each : draining_) {
    watched.push_back({each.socket.get(), POLLIN, 0});
    left = std::min(left, each.deadline.left());
  }
  if (reconsider_) left = 0ms;
  ::poll(watched.data(), watched.size(), static_cast<int>(left.count()));
  if (watched[0].revents != 0) drain_wakeup(wakeup_.get());
  for (size_t i = 0; i < incoming_.size(); ++i) {
    const IncomingConnection::State before = incoming_[i].state();
    if (watched[2 + i].revents != 0 || incoming_[i].deadline().passed()) incoming_[i].advance();
    if (incoming_[i].state() != before) reconsider_ = true;
  }
  resting_ = false;
  if (watched[1].revents != 0) receive();
}

void Listener::receive() {
  for (int i = 0; i < kAtOnce; ++i) {
    Socket socket(repeated([&] { return ::accept4(listener_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC); }));
    if (socket.valid()) {
      incoming_.emplace_back(std::move(socket), own_.listener);
      incoming_.back().advance();
      if (incoming_.back().state() != IncomingConnection::State::unauthenticated) reconsider_ = true;
      make_room();
    } else if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
      resting_ = true;
      return;
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      return;
    }
  }
}

void Listener::make_room() {
  const auto unauthenticated = [](const IncomingConnection& each) {
    return each.state() == IncomingConnection::State::unauthenticated;
  };
  const auto named = [&](const IncomingConnection& each) { return !unauthenticated(each); };
  // The oldest is closed: a rank sends its Hello as soon as it is connected, and tries again if it is dropped.
  if (static_cast<size_t>(std::count_if(incoming_.begin(), incoming_.end(), unauthenticated)) > kMostUnauthenticated) {
    incoming_.erase(std::find_if(incoming_.begin(), incoming_.end(), unauthenticated));
  }
  if (static_cast<size_t>(std::count_if(incoming_.begin(), incoming_.end(), named)) > kNamed) {
    incoming_.erase(std::find_if(incoming_.begin(), incoming_.end(), named));
  }
}

void Listener::poll_incoming() {
  if (!std::exchange(reconsider_, false)) return;
  std::erase_if(incoming_, [&](IncomingConnection& each) {
    try {
      return each.state() == IncomingConnection::State::gone ||
             (each.state() == IncomingConnection::State::waiting && consider(each));
    } catch (const std::bad_alloc&) {
      return true;
    }
  });
}

/// Returns whether the connection need not wait any longer.
bool Listener::consider(IncomingConnection& incoming) {
  const Hello& hello = incoming.hello();
  const Member host = member({hello.group, hello.to});
  const std::shared_ptr<Resident> resident = host.resident.lock();
  if (!resident) return turn_away(incoming);  // otherwise its group is not made here yet
  const std::optional<ConnectionKind> which = kind_of(hello);
  if (!incoming.proves(host.key) || !which) return true;
  if (!resident->wants(static_cast<int>(hello.from), *which)) return turn_away(incoming) || true;
  // The peer may have taken a connection over which this rank has proved itself, and no other.
  const bool rivals = std::any_of(connectors_.begin(), connectors_.end(),
                                  [&](const Connector& own) { return same_pair(own, hello) && own.has_proved(); });
  if (rivals && hello.to > hello.from) return false;
  resident->admit(static_cast<int>(hello.from), *which, [&] { return incoming.welcome(host.key); });
  if (incoming.state() != IncomingConnection::State::gone) turn_away(incoming);  // the rank left meanwhile
  return true;
}

void Listener::poll_connectors() {
  const size_t before = connectors_.size();
  std::erase_if(connectors_, [&](Connector& each) { return finish(each); });
  if (connectors_.size() != before) reconsider_ = true;
}

/// Returns whether the connector has ended.
bool Listener::finish(Connector& connector) {
  const Connector::Target& call = connector.target();
  const MemberId id{group_name(call.key), call.from};
  const std::shared_ptr<Resident> resident = member(id).resident.lock();
  const int peer = static_cast<int>(call.to);
  if (!resident || !resident->wants(peer, call.which)) return finish_for(departed(id), connector);
  Connector::Outcome outcome = Connector::Outcome::failed;
  try {
    outcome = connector.advance();
  } catch (const Error& error) {
    resident->give_up(peer, call.which, error.kind(), in_words([&] { return std::string(error.what()); }));
    return true;
  } catch (const std::bad_alloc&) {
    resident->give_up(peer, call.which, ErrorKind::resource_error, kOutOfMemory);
    return true;
  }
  if (outcome == Connector::Outcome::going) return false;
  if (outcome == Connector::Outcome::made) {
    resident->admit(peer, call.which, [&] { return connector.take(); });
    if (const auto gone = departed(id)) part(connector.take(), gone->final_frame);  // the rank left before admit()
    return true;
  }
  for (IncomingConnection& each : incoming_) {  // the peer may have connected in the other direction
    if (each.state() != IncomingConnection::State::waiting || !same_pair(connector, each.hello()) ||
        !each.proves(call.key))
      continue;
    resident->admit(peer, call.which, [&] { return each.welcome(call.key); });
    if (!resident->wants(peer, call.which)) return true;
  }
  resident->give_up(peer, call.which, connector.kind(), connector.reason());
  return true;
}

/// The peer may have taken the connection already: it must not be reset.
bool Listener::finish_for(const std::optional<Departed>& departed, Connector& connector) {
  if (!departed || departed->final_frame.empty() || connector.target().which != ConnectionKind::collectives)
    return true;
  try {
    const Connector::Outcome outcome = connector.advance();
    if (outcome == Connector::Outcome::made) part(connector.take(), departed->final_frame);
    return outcome != Connector::Outcome::going;
  } catch (const std::exception&) {
    return true;
  }
}

}  // namespace ringlet
