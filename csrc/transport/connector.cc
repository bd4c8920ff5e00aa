#include "transport/connector.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/system_call.h"
#include "transport/congestion.h"

namespace ringlet {
namespace {

using namespace std::chrono_literals;

constexpr auto kWhole = 10s;      ///< what a connector gets to find an address that answers
constexpr auto kPerAddress = 2s;  ///< what one address gets to answer; TCP sends a lost SYN again after 1 s
constexpr auto kStagger = 50ms;   // between two addresses; a host of the same network answers in much less
constexpr auto kFirstPause = 20ms, kLongestPause = 500ms;

constexpr int kComplete = -1, kClosed = 1 << 16;  // returned like errno values, and equal to none

std::string why(int code) { return code == kClosed ? "closed the connection" : std::strerror(code); }

}  // namespace

Connector::Connector(Target target)
    : target_(std::move(target)),
      addresses_(target_.address.reachable_from(host_identity())),
      start_(Deadline::after(0ms)),
      until_(Deadline::after(target_.which == ConnectionKind::collectives ? kWhole : kLongestTimeout)),
      pause_(kFirstPause) {}

void Connector::watch(std::vector<pollfd>& list) const {
  for (const Attempt& each : attempts_) {
    const bool connecting = each.state == Attempt::State::connecting;
    list.push_back({each.socket.get(), static_cast<short>(connecting ? POLLOUT : POLLIN), 0});
  }
}

std::chrono::milliseconds Connector::left() const {
  std::chrono::milliseconds left = next_ < addresses_.size() ? start_.left() : kLongestTimeout;
  for (const Attempt& each : attempts_) left = std::min(left, each.limit.left());
  return left;
}

bool Connector::has_proved() const {
  return std::any_of(attempts_.begin(), attempts_.end(),
                     [](const Attempt& each) { return each.state == Attempt::State::proving; });
}

std::string Connector::place(const Address& address) const {
  const std::string text = address.is_v4() ? address.text() : '[' + address.text() + ']';
  return text + ':' + std::to_string(target_.address.port);
}

Connector::Outcome Connector::advance() {
  if (addresses_.empty()) {
    fail(ErrorKind::peer_lost, target_.address.why_unreachable());
    return Outcome::failed;
  }
  const auto ended = [&](Step step) { return step == Step::made || step == Step::failed; };
  const auto outcome = [&](Step step) {
    attempts_.clear();
    return step == Step::made ? Outcome::made : Outcome::failed;
  };
  for (size_t i = 0; i < attempts_.size();) {
    const Step step = advance(attempts_[i]);
    if (ended(step)) return outcome(step);
    if (step == Step::missed) {
      attempts_.erase(attempts_.begin() + static_cast<std::ptrdiff_t>(i));
      start_ = Deadline::after(0ms);  // the next address need not wait
    } else {
      ++i;
    }
  }
  while (next_ < addresses_.size() && start_.passed()) {
    const Step step = start(addresses_[next_++]);
    if (ended(step)) return outcome(step);
    if (step == Step::going) start_ = Deadline::after(kStagger);
  }
  return attempts_.empty() && next_ == addresses_.size() ? end_round() : Outcome::going;
}

Connector::Step Connector::start(const Address& address) {
  socklen_t length = 0;
  const sockaddr_storage to = address.with_port(target_.address.port, length);
  Socket socket(::socket(to.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!socket.valid()) {
    if (errno == EAFNOSUPPORT) return miss(address, std::strerror(errno), false);
    return fail(ErrorKind::resource_error, std::string("cannot make a TCP socket: ") + std::strerror(errno));
  }
  use_congestion_control(socket.get());
  // A connect() that a signal ends goes on as one that does not wait: it is not repeated.
  if (::connect(socket.get(), reinterpret_cast<const sockaddr*>(&to), length) != 0 && errno != EINPROGRESS &&
      errno != EINTR) {
    return unreachable(address, errno);
  }
  attempts_.push_back({&address, std::move(socket), Deadline::after(kPerAddress)});
  return Step::going;
}

Connector::Step Connector::advance(Attempt& attempt) {
  switch (attempt.state) {
    case Attempt::State::connecting: return connected(attempt);
    case Attempt::State::asking: return answered(attempt);
    case Attempt::State::proving: return welcomed(attempt);
  }
  return Step::failed;
}

Connector::Step Connector::connected(Attempt& attempt) {
  if (events_now(attempt.socket.get(), POLLOUT) == 0) {
    return attempt.limit.passed() ? miss(*attempt.address, "no answer", true) : Step::going;
  }
  int code = 0;
  socklen_t length = sizeof code;
  ::getsockopt(attempt.socket.get(), SOL_SOCKET, SO_ERROR, &code, &length);
  if (code != 0) return unreachable(*attempt.address, code);
  attempt.hello = {.listener = target_.address.listener,
                   .group = group_name(target_.key),
                   .from = target_.from,
                   .to = target_.to,
                   .which = static_cast<uint64_t>(target_.which),
                   .nonce = random_token()};
  const Hello& hello = attempt.hello;
  if (repeated([&] { return ::send(attempt.socket.get(), &hello, sizeof hello, MSG_NOSIGNAL); }) != sizeof hello) {
    return miss(*attempt.address, std::strerror(errno), true);
  }
  attempt.state = Attempt::State::asking;
  attempt.limit = Deadline::after(kPerAddress);
  return Step::going;
}

int Connector::Attempt::fill(void* message, size_t bytes) {
  const ssize_t n =
      repeated([&] { return ::recv(socket.get(), static_cast<std::byte*>(message) + got, bytes - got, MSG_DONTWAIT); });
  if (n == 0) return kClosed;
  if (n < 0) return is_passing(errno) ? 0 : errno;
  got += static_cast<size_t>(n);
  return got == bytes ? kComplete : 0;
}

Connector::Step Connector::answered(Attempt& attempt) {
  const int state = attempt.fill(&attempt.answer, sizeof attempt.answer);
  if (state > 0) return miss(*attempt.address, why(state), true);
  if (state == 0) {
    if (!attempt.limit.passed()) return Step::going;
    silent_ = true;
    return miss(*attempt.address, "connected, but got no answer", true);
  }
  if (attempt.answer.magic != kWireMagic) return miss(*attempt.address, "a program other than ringlet answered", false);
  if (attempt.answer.version != kProtocol) {
    return fail(ErrorKind::invalid_usage, place(*attempt.address) + " speaks version " +
                                              std::to_string(attempt.answer.version) +
                                              " of ringlet's protocol, this rank " + std::to_string(kProtocol) +
                                              ": install the same version on all hosts");
  }
  const Proof proof = prove(target_.key, Domain::initiator, attempt.hello, attempt.answer);
  if (repeated([&] { return ::send(attempt.socket.get(), &proof, sizeof proof, MSG_NOSIGNAL); }) != sizeof proof) {
    return miss(*attempt.address, std::strerror(errno), true);
  }
  attempt.state = Attempt::State::proving;
  attempt.got = 0;
  attempt.limit = Deadline::after(kLongestTimeout);
  return Step::going;
}

Connector::Step Connector::welcomed(Attempt& attempt) {
  const int state = attempt.fill(&attempt.proof, sizeof attempt.proof);
  if (state > 0) return miss(*attempt.address, why(state), true);
  // The peer's group may not be made yet, or its own connector may be under way: this may take any time. The timeout of
  // the call that waits for the connection ends the wait.
  if (state == 0) return Step::going;
  if (same(attempt.proof, prove(target_.key, Domain::acceptor, attempt.hello, attempt.answer))) {
    made_ = std::move(attempt.socket);
    return Step::made;
  }
  if (same(attempt.proof, prove(target_.key, Domain::departed, attempt.hello, attempt.answer))) {
    return fail(ErrorKind::peer_lost, "rank " + std::to_string(target_.to) +
                                          " left the group: it finished early, or raised an error: look at its output");
  }
  return miss(*attempt.address, "answered, but does not know this group's secret", false);
}

Connector::Step Connector::unreachable(const Address& address, int code) {
  nobody_listens_ = nobody_listens_ || (address.is_loopback() && code == ECONNREFUSED);
  return miss(address, std::strerror(code), !address.is_loopback());
}

Connector::Step Connector::miss(const Address& address, const std::string& why, bool worth_repeating) {
  reasons_ += (reasons_.empty() ? "" : "; ") + place(address) + ": " + why;
  repeat_ = repeat_ || worth_repeating;
  return Step::missed;
}

Connector::Step Connector::fail(ErrorKind kind, const std::string& why) {
  kind_ = kind;
  reason_ = why;
  return Step::failed;
}

Connector::Outcome Connector::end_round() {
  if (!repeat_ || ((nobody_listens_ || until_.passed()) && !silent_)) {
    fail(ErrorKind::peer_lost, reasons_ + "; its process may be gone, or a firewall may be between the hosts");
    return Outcome::failed;
  }
  next_ = 0;
  repeat_ = silent_ = false;
  reasons_.clear();
  start_ = Deadline::after(pause_);
  pause_ = std::min<std::chrono::milliseconds>(2 * pause_, kLongestPause);
  return Outcome::going;
}

}  // namespace ringlet
