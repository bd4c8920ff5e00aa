#include "transport/incoming_connection.h"

#include <sys/socket.h>

#include <cerrno>
#include <utility>

#include "base/system_call.h"

namespace ringlet {
namespace {

using namespace std::chrono_literals;

constexpr auto kPatience = 5s;  ///< what a connection gets to prove itself, which takes two round trips
// A proof waits until its group is made here, and until it is decided which of two connections is used. It is over when
// the initiator gives up.
constexpr auto kHold = kLongestTimeout;

}  // namespace

IncomingConnection::IncomingConnection(Socket socket, uint64_t listener)
    : socket_(std::move(socket)), listener_id_(listener), deadline_(Deadline::after(kPatience)) {}

bool IncomingConnection::fill(void* message, size_t bytes) noexcept {
  const ssize_t n = repeated(
      [&] { return ::recv(socket_.get(), static_cast<std::byte*>(message) + got_, bytes - got_, MSG_DONTWAIT); });
  if (n == 0 || (n < 0 && !is_passing(errno))) state_ = State::gone;
  if (n > 0) got_ += static_cast<size_t>(n);
  if (got_ < bytes) return false;
  got_ = 0;
  return true;
}

/// Sends a short message; there is room for it in a connection that is new.
bool IncomingConnection::give(const void* message, size_t bytes) noexcept {
  const auto send = [&] { return ::send(socket_.get(), message, bytes, MSG_NOSIGNAL | MSG_DONTWAIT); };
  return repeated(send) == static_cast<ssize_t>(bytes);
}

void IncomingConnection::send_answer() noexcept {
  state_ = State::gone;
  if (hello_.magic != kWireMagic) return;
  // Another version gets an answer, too, so that its user learns why the connection fails.
  if (hello_.version == kProtocol && hello_.listener != listener_id_) return;
  try {
    answer_.nonce = random_token();
  } catch (...) {  // without randomness there is no proof: the connection is refused, and the initiator says so
    return;
  }
  if (!give(&answer_, sizeof answer_)) return;
  if (hello_.version == kProtocol) state_ = State::named;
}

void IncomingConnection::look_for_end() noexcept {
  std::byte byte;
  const ssize_t n = repeated([&] { return ::recv(socket_.get(), &byte, 1, MSG_DONTWAIT | MSG_PEEK); });
  // The initiator must not send more before the acceptor's proof.
  if (n >= 0 || !is_passing(errno)) state_ = State::gone;
}

IncomingConnection::State IncomingConnection::advance() noexcept {
  if (state_ == State::unauthenticated && fill(&hello_, sizeof hello_)) send_answer();
  if (state_ == State::named && fill(&proof_, sizeof proof_)) {
    state_ = State::waiting;
    deadline_ = Deadline::after(kHold);
  }
  if (state_ == State::waiting) look_for_end();
  if (state_ != State::gone && deadline_.passed()) state_ = State::gone;
  return state_;
}

bool IncomingConnection::proves(const Token& key) const {
  return same(proof_, prove(key, Domain::initiator, hello_, answer_));
}

bool IncomingConnection::answer(const Token& key, Domain domain) noexcept {
  state_ = State::gone;
  const Proof proof = prove(key, domain, hello_, answer_);
  return give(&proof, sizeof proof);
}

Socket IncomingConnection::welcome(const Token& key) noexcept {
  return answer(key, Domain::acceptor) ? std::move(socket_) : Socket();
}

void IncomingConnection::send_away(const Token& key) noexcept { answer(key, Domain::departed); }

}  // namespace ringlet
