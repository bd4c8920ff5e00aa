#include "transport/connector.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "transport/congestion.h"

namespace ringlet {
namespace {

using namespace std::chrono_literals;

constexpr auto kWhole = 10s;      // the time to find a listener that answers
constexpr auto kPerAddress = 2s;  // TCP sends a lost SYN again after 1 s
// The time to be admitted, after the right listener has answered: the peer's group may not be made yet, or the
// peer's own connector may be under way.
constexpr auto kWelcome = 50s;
constexpr auto kFirstPause = 20ms, kLongestPause = 500ms;

constexpr int kComplete = -1, kClosed = 1 << 16;  // returned like errno values, and equal to none

std::string why(int code) { return code == kClosed ? "closed the connection" : std::strerror(code); }

}  // namespace

Connector::Connector(Target target)
    : target_(std::move(target)),
      addresses_(target_.address.reachable_from(host_identity())),
      until_(Deadline::after(kWhole)),
      step_(Deadline::after(0ms)),
      pause_(kFirstPause) {}

short Connector::events() const { return state_ == State::connecting ? POLLOUT : POLLIN; }

std::string Connector::place() const {
  const Address& address = addresses_[address_];
  const std::string text = address.is_v4() ? address.text() : '[' + address.text() + ']';
  return text + ':' + std::to_string(target_.address.port);
}

Connector::Outcome Connector::advance() {
  switch (state_) {
    case State::pause: return step_.passed() ? start() : Outcome::going;
    case State::connecting: return connected();
    case State::asking: return answered();
    case State::proving: return welcomed();
  }
  return Outcome::failed;
}

Connector::Outcome Connector::start() {
  if (addresses_.empty()) {
    return fail(ErrorKind::peer_lost,
                "it has only loopback addresses, which other hosts cannot reach: "
                "set RINGLET_INTERFACE there to choose others");
  }
  socklen_t length = 0;
  const sockaddr_storage address = addresses_[address_].with_port(target_.address.port, length);
  socket_ = Socket(::socket(address.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!socket_.valid()) {
    if (errno == EAFNOSUPPORT) return miss(std::strerror(errno), false);
    return fail(ErrorKind::system_error, std::string("cannot make a TCP socket: ") + std::strerror(errno));
  }
  use_congestion_control(socket_.get());
  state_ = State::connecting;
  step_ = Deadline::after(kPerAddress);
  if (::connect(socket_.get(), reinterpret_cast<const sockaddr*>(&address), length) == 0) return connected();
  return errno == EINPROGRESS ? Outcome::going : miss(std::strerror(errno), false);
}

Connector::Outcome Connector::connected() {
  pollfd ready{socket_.get(), POLLOUT, 0};
  if (::poll(&ready, 1, 0) <= 0) return step_.passed() ? miss("no answer", true) : Outcome::going;
  int code = 0;
  socklen_t length = sizeof code;
  ::getsockopt(socket_.get(), SOL_SOCKET, SO_ERROR, &code, &length);
  if (code != 0) return miss(std::strerror(code), code == ETIMEDOUT);
  hello_ = {.listener = target_.address.listener,
            .group = group_name(target_.key),
            .from = target_.from,
            .to = target_.to,
            .which = static_cast<uint64_t>(target_.which),
            .nonce = random_token()};
  if (::send(socket_.get(), &hello_, sizeof hello_, MSG_NOSIGNAL) != sizeof hello_) {
    return miss(std::strerror(errno), true);
  }
  state_ = State::asking;
  got_ = 0;
  step_ = Deadline::after(kPerAddress);
  return Outcome::going;
}

int Connector::fill(void* message, size_t bytes) {
  const ssize_t n = ::recv(socket_.get(), static_cast<std::byte*>(message) + got_, bytes - got_, MSG_DONTWAIT);
  if (n == 0) return kClosed;
  if (n < 0) return errno == EAGAIN || errno == EINTR ? 0 : errno;
  got_ += static_cast<size_t>(n);
  return got_ == bytes ? kComplete : 0;
}

Connector::Outcome Connector::answered() {
  const int state = fill(&answer_, sizeof answer_);
  if (state > 0) return miss(why(state), true);
  if (state == 0) return step_.passed() ? miss("connected, but got no answer", true) : Outcome::going;
  if (answer_.magic != kWireMagic) return miss("a program other than ringlet answered", false);
  if (answer_.version != kWireVersion) {
    return fail(ErrorKind::invalid_usage, place() + " speaks version " + std::to_string(answer_.version) +
                                              " of ringlet's wire format, this rank " + std::to_string(kWireVersion) +
                                              ": install the same version on all hosts");
  }
  const Proof proof = prove(target_.key, Domain::initiator, hello_, answer_);
  if (::send(socket_.get(), &proof, sizeof proof, MSG_NOSIGNAL) != sizeof proof) {
    return miss(std::strerror(errno), true);
  }
  state_ = State::proving;
  got_ = 0;
  step_ = Deadline::after(kWelcome);
  return Outcome::going;
}

Connector::Outcome Connector::welcomed() {
  const int state = fill(&proof_, sizeof proof_);
  if (state > 0) return miss(why(state), true);
  if (state == 0) {
    return step_.passed() ? fail(ErrorKind::peer_lost, place() + " answered, but did not join this group in time")
                          : Outcome::going;
  }
  if (same(proof_, prove(target_.key, Domain::acceptor, hello_, answer_))) return Outcome::made;
  if (same(proof_, prove(target_.key, Domain::departed, hello_, answer_))) {
    return fail(ErrorKind::peer_lost, "rank " + std::to_string(target_.to) +
                                          " left the group: it finished early, or raised an error: look at its output");
  }
  return miss("answered, but does not know this group's secret", false);
}

Connector::Outcome Connector::miss(const std::string& why, bool worth_repeating) {
  reasons_ += (reasons_.empty() ? "" : "; ") + place() + ": " + why;
  repeat_ = repeat_ || worth_repeating;
  socket_ = Socket();
  const auto give_up = [&] {
    return fail(ErrorKind::peer_lost, reasons_ + "; its process may be gone, or a firewall may be between the hosts");
  };
  if (until_.passed()) return give_up();
  state_ = State::pause;
  step_ = Deadline::after(0ms);
  if (++address_ < addresses_.size()) return Outcome::going;
  if (!repeat_) return give_up();
  address_ = 0;
  repeat_ = false;
  reasons_.clear();
  step_ = Deadline::after(pause_);
  pause_ = std::min<std::chrono::milliseconds>(2 * pause_, kLongestPause);
  return Outcome::going;
}

Connector::Outcome Connector::fail(ErrorKind kind, const std::string& why) {
  socket_ = Socket();
  kind_ = kind;
  reason_ = why;
  return Outcome::failed;
}

}  // namespace ringlet
