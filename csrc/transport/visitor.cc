#include "transport/visitor.h"

#include <sys/socket.h>

#include <cerrno>
#include <utility>

namespace ringlet {
namespace {

using namespace std::chrono_literals;

constexpr auto kPatience = 5s;  // for Hello and Proof, which a peer sends within two round trips
// A proof waits while its group is being made here, or while it is open which of two connections is kept. Dial gives up
// before that.
constexpr auto kHold = 60s;

bool transient(int code) { return code == EAGAIN || code == EWOULDBLOCK || code == EINTR; }

}  // namespace

Visitor::Visitor(Socket socket, uint64_t door)
    : socket_(std::move(socket)), door_(door), deadline_(Deadline::after(kPatience)) {}

bool Visitor::fill(void* message, size_t bytes) noexcept {
  const ssize_t n = ::recv(socket_.get(), static_cast<std::byte*>(message) + got_, bytes - got_, MSG_DONTWAIT);
  if (n == 0 || (n < 0 && !transient(errno))) stage_ = Stage::gone;
  if (n > 0) got_ += static_cast<size_t>(n);
  if (got_ < bytes) return false;
  got_ = 0;
  return true;
}

void Visitor::greet() noexcept {
  stage_ = Stage::gone;
  if (hello_.magic != kWireMagic) return;
  // Another version gets an answer, too, so that its user learns why nothing comes of it.
  if (hello_.version == kWireVersion && hello_.door != door_) return;
  try {
    answer_.nonce = random_token();
  } catch (...) {  // no randomness, no proof: the visitor is refused, and the dialler says so
    return;
  }
  if (::send(socket_.get(), &answer_, sizeof answer_, MSG_NOSIGNAL | MSG_DONTWAIT) != sizeof answer_) return;
  if (hello_.version == kWireVersion) stage_ = Stage::named;
}

void Visitor::look_for_end() noexcept {
  std::byte byte;
  const ssize_t n = ::recv(socket_.get(), &byte, 1, MSG_DONTWAIT | MSG_PEEK);
  // It must not speak before it is welcome.
  if (n >= 0 || !transient(errno)) stage_ = Stage::gone;
}

Visitor::Stage Visitor::advance() noexcept {
  if (stage_ == Stage::stranger && fill(&hello_, sizeof hello_)) greet();
  if (stage_ == Stage::named && fill(&proof_, sizeof proof_)) {
    stage_ = Stage::waiting;
    deadline_ = Deadline::after(kHold);
  }
  if (stage_ == Stage::waiting) look_for_end();
  if (stage_ != Stage::gone && deadline_.passed()) stage_ = Stage::gone;
  return stage_;
}

bool Visitor::proves(const Token& key) const { return same(proof_, prove(key, Domain::dialler, hello_, answer_)); }

bool Visitor::answer(const Token& key, Domain domain) noexcept {
  stage_ = Stage::gone;
  const Proof proof = prove(key, domain, hello_, answer_);
  return ::send(socket_.get(), &proof, sizeof proof, MSG_NOSIGNAL | MSG_DONTWAIT) == sizeof proof;
}

Socket Visitor::welcome(const Token& key) noexcept {
  return answer(key, Domain::acceptor) ? std::move(socket_) : Socket();
}

void Visitor::send_away(const Token& key) noexcept { answer(key, Domain::departed); }

}  // namespace ringlet
