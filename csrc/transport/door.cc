#include "transport/door.h"

#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <optional>

#include "base/thread.h"
#include "transport/congestion.h"

namespace ringlet {
namespace {

using namespace std::chrono_literals;

constexpr size_t kStrangers = 128;  // connections that have not named this door
constexpr size_t kNamed = 512;      // those that have: ranks of this job, or who overheard one of them
constexpr size_t kDeparted = 256;
constexpr size_t kLeaving = 256;
constexpr auto kParting = 2s;   // for a peer to read last words
constexpr int kBacklog = 4096;  // the kernel takes the smaller of this and net.core.somaxconn
constexpr int kAtOnce = 256;    // accepted between two looks at the others
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

/// At any address and a free port, for IPv6 and IPv4 where the machine knows both.
Socket listen_anywhere() {
  congestion_control();  // throws now, if at all
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
  sockaddr_in6 address{};  // the port stands at the same place in both families
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

/// The acceptor's lane that meets the dialler's; none where that lane is never dialled.
std::optional<Lane> facing(uint64_t lane) {
  if (lane == static_cast<uint64_t>(Lane::collectives)) return Lane::collectives;
  if (lane == static_cast<uint64_t>(Lane::outgoing)) return Lane::incoming;
  return std::nullopt;
}

/// Whether the two join the same ranks on lane `collectives`, dialled from either end.
bool meet(const Dial& own, const Hello& theirs) {
  const Dial::Call& call = own.call();
  return call.lane == Lane::collectives && theirs.lane == static_cast<uint64_t>(Lane::collectives) &&
         call.from == theirs.to && call.to == theirs.from && group_name(call.key) == theirs.group;
}

}  // namespace

Door& Door::process() {
  static std::mutex mutex;
  static Door* door = nullptr;  // never destroyed: its thread runs as long as the process
  const std::lock_guard lock(mutex);
  if (door == nullptr || door->owner_ != ::getpid()) {
    auto made = std::unique_ptr<Door>(new Door);
    made->start();
    door = made.release();
  }
  return *door;
}

Door::Door() : owner_(::getpid()), listener_(listen_anywhere()), bell_(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
  if (!bell_.valid()) throw_errno("eventfd");
  const Token noise = random_token();
  std::copy_n(noise.begin(), sizeof card_.door, reinterpret_cast<uint8_t*>(&card_.door));
  card_.host = host_identity();
  card_.port = port_of(listener_);
  card_.addresses = own_addresses(chosen_interfaces());
  if (card_.addresses.empty()) {
    throw SystemError(
        "no network interface of this host is up, so no rank could reach this one over TCP: bring one up (inside one "
        "host \"ip link set lo up\" will do), or choose transport=\"shared_memory\" for ranks of one host");
  }
}

void Door::start() {
  sigset_t all, before;  // signals are for the program's own threads
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    start_thread("TCP connections", [this] { run(); }).detach();
  } catch (...) {
    ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
    throw;
  }
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void Door::enter(const Token& key, int rank, const std::shared_ptr<Resident>& resident) {
  {
    const std::lock_guard lock(mutex_);
    const Place place{group_name(key), static_cast<uint32_t>(rank)};
    if (!members_.emplace(place, Member{key, resident}).second) {
      throw InvalidUsage("rank " + std::to_string(rank) + " of one group was made twice in one process");
    }
    stirred_ = true;
  }
  wake();
}

void Door::leave(const Token& key, int rank, Bytes last_words) noexcept {
  if (owner_ != ::getpid()) return;  // a forked child's copy of a group; its parent's is still in use
  {
    const std::lock_guard lock(mutex_);
    const Place place{group_name(key), static_cast<uint32_t>(rank)};
    members_.erase(place);
    departed_.push_back({place, key, std::move(last_words)});
    if (departed_.size() > kDeparted) departed_.pop_front();
    stirred_ = true;
  }
  wake();
}

void Door::dial(Dial::Call call) {
  {
    const std::lock_guard lock(mutex_);
    calls_.emplace_back(std::move(call));
  }
  wake();
}

void Door::wake() noexcept {
  const uint64_t one = 1;
  // Only a full counter refuses it, and then the thread wakes anyway.
  [[maybe_unused]] const ssize_t written = ::write(bell_.get(), &one, sizeof one);
}

Door::Member Door::member(const Place& place) {
  const std::lock_guard lock(mutex_);
  const auto found = members_.find(place);
  return found == members_.end() ? Member{} : found->second;
}

std::optional<Door::Departed> Door::departed(const Place& place) {
  const std::lock_guard lock(mutex_);
  const auto found =
      std::find_if(departed_.begin(), departed_.end(), [&](const auto& each) { return each.place == place; });
  return found == departed_.end() ? std::nullopt : std::optional(*found);
}

/// Whether the rank that it wants has left the group.
bool Door::turn_away(Visitor& visitor) {
  const Hello& hello = visitor.hello();
  const std::optional<Departed> gone = departed({hello.group, hello.to});
  if (!gone) return false;
  if (!visitor.proves(gone->key)) return true;
  if (gone->last_words.empty() || facing(hello.lane) != Lane::collectives) {
    visitor.send_away(gone->key);
  } else {
    part(visitor.welcome(gone->key), gone->last_words);
  }
  return true;
}

/// Says the last words. A connection that is closed while the peer still writes is reset, which can take them with it.
void Door::part(Socket socket, const Bytes& last_words) {
  if (!socket.valid()) return;
  ::send(socket.get(), last_words.data(), last_words.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
  ::shutdown(socket.get(), SHUT_WR);
  leaving_.push_back({std::move(socket), Deadline::after(kParting)});
  if (leaving_.size() > kLeaving) leaving_.pop_front();
}

void Door::see_off() {
  std::erase_if(leaving_, [](const Leaving& each) { return !each.socket.discard() || each.deadline.passed(); });
}

void Door::run() {
  for (;;) {
    wait();
    take_calls();
    hear_visitors();
    hear_dials();
    see_off();
  }
}

void Door::take_calls() {
  const std::lock_guard lock(mutex_);
  for (Dial& each : calls_) dials_.push_back(std::move(each));
  calls_.clear();
  reconsider_ = reconsider_ || std::exchange(stirred_, false);
}

void Door::wait() {
  std::vector<pollfd> watched{{bell_.get(), POLLIN, 0}, {resting_ ? -1 : listener_.get(), POLLIN, 0}};
  auto left = resting_ ? kRest : std::chrono::milliseconds(1h);
  for (const Visitor& each : visitors_) {
    watched.push_back({each.descriptor(), POLLIN, 0});
    left = std::min(left, each.deadline().left());
  }
  for (const Dial& each : dials_) {
    watched.push_back({each.descriptor(), each.events(), 0});
    left = std::min(left, each.next().left());
  }
  for (const Leaving& each : leaving_) {
    watched.push_back({each.socket.get(), POLLIN, 0});
    left = std::min(left, each.deadline.left());
  }
  if (reconsider_) left = 0ms;
  ::poll(watched.data(), watched.size(), static_cast<int>(left.count()));
  uint64_t rung;
  if (watched[0].revents != 0) [[maybe_unused]]
    const ssize_t n = ::read(bell_.get(), &rung, sizeof rung);
  for (size_t i = 0; i < visitors_.size(); ++i) {
    const Visitor::Stage before = visitors_[i].stage();
    if (watched[2 + i].revents != 0 || visitors_[i].deadline().passed()) visitors_[i].advance();
    if (visitors_[i].stage() != before) reconsider_ = true;
  }
  resting_ = false;
  if (watched[1].revents != 0) receive();
}

void Door::receive() {
  for (int i = 0; i < kAtOnce; ++i) {
    Socket socket(::accept4(listener_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (socket.valid()) {
      visitors_.emplace_back(std::move(socket), card_.door);
      visitors_.back().advance();
      if (visitors_.back().stage() != Visitor::Stage::stranger) reconsider_ = true;
      make_room();
    } else if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
      resting_ = true;
      return;
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      return;
    }
  }
}

void Door::make_room() {
  const auto stranger = [](const Visitor& each) { return each.stage() == Visitor::Stage::stranger; };
  const auto named = [&](const Visitor& each) { return !stranger(each); };
  // The oldest goes: a rank's own first words follow its connection at once, and it dials again if it is unlucky.
  if (static_cast<size_t>(std::count_if(visitors_.begin(), visitors_.end(), stranger)) > kStrangers) {
    visitors_.erase(std::find_if(visitors_.begin(), visitors_.end(), stranger));
  }
  if (static_cast<size_t>(std::count_if(visitors_.begin(), visitors_.end(), named)) > kNamed) {
    visitors_.erase(std::find_if(visitors_.begin(), visitors_.end(), named));
  }
}

void Door::hear_visitors() {
  if (!std::exchange(reconsider_, false)) return;
  std::erase_if(visitors_, [&](Visitor& each) {
    return each.stage() == Visitor::Stage::gone || (each.stage() == Visitor::Stage::waiting && consider(each));
  });
}

/// Whether it need not wait any longer.
bool Door::consider(Visitor& visitor) {
  const Hello& hello = visitor.hello();
  const Member host = member({hello.group, hello.to});
  const std::shared_ptr<Resident> resident = host.resident.lock();
  if (!resident) return turn_away(visitor);  // else its group is not made here yet
  const std::optional<Lane> lane = facing(hello.lane);
  if (!visitor.proves(host.key) || !lane) return true;
  if (!resident->wants(static_cast<int>(hello.from), *lane)) return turn_away(visitor) || true;
  const bool rivals = std::any_of(dials_.begin(), dials_.end(), [&](const Dial& own) { return meet(own, hello); });
  if (rivals && hello.to > hello.from) return false;
  resident->admit(static_cast<int>(hello.from), *lane, [&] { return visitor.welcome(host.key); });
  if (visitor.stage() != Visitor::Stage::gone) turn_away(visitor);  // the rank left just now
  return true;
}

void Door::hear_dials() {
  const size_t before = dials_.size();
  std::erase_if(dials_, [&](Dial& each) { return finish(each); });
  if (dials_.size() != before) reconsider_ = true;
}

/// Whether it came to an end.
bool Door::finish(Dial& dial) {
  const Dial::Call& call = dial.call();
  const Place place{group_name(call.key), call.from};
  const std::shared_ptr<Resident> resident = member(place).resident.lock();
  const int peer = static_cast<int>(call.to);
  if (!resident || !resident->wants(peer, call.lane)) return finish_for(departed(place), dial);
  Dial::Outcome outcome = Dial::Outcome::failed;
  try {
    outcome = dial.advance();
  } catch (const Error& error) {
    resident->give_up(peer, call.lane, error.kind(), error.what());
    return true;
  }
  if (outcome == Dial::Outcome::going) return false;
  if (outcome == Dial::Outcome::made) {
    resident->admit(peer, call.lane, [&] { return dial.take(); });
    if (const auto gone = departed(place)) part(dial.take(), gone->last_words);  // unless it was admitted
    return true;
  }
  for (Visitor& each : visitors_) {  // the peer may have found the way that this rank did not find
    if (each.stage() != Visitor::Stage::waiting || !meet(dial, each.hello()) || !each.proves(call.key)) continue;
    resident->admit(peer, call.lane, [&] { return each.welcome(call.key); });
    if (!resident->wants(peer, call.lane)) return true;
  }
  resident->give_up(peer, call.lane, dial.kind(), dial.reason());
  return true;
}

/// The peer may have taken the connection already, and would find it reset.
bool Door::finish_for(const std::optional<Departed>& departed, Dial& dial) {
  if (!departed || departed->last_words.empty() || dial.call().lane != Lane::collectives) return true;
  try {
    const Dial::Outcome outcome = dial.advance();
    if (outcome == Dial::Outcome::made) part(dial.take(), departed->last_words);
    return outcome != Dial::Outcome::going;
  } catch (const Error&) {
    return true;
  }
}

}  // namespace ringlet
