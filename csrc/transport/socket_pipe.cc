#include "transport/socket_pipe.h"

#include <limits.h>
#include <linux/sockios.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/system_call.h"

namespace ringlet {
namespace {

// If nothing is in flight: the first probe is sent after 5 s of silence, and three of them 2 s apart, which makes 11 s.
constexpr int kIdleSeconds = 5, kIntervalSeconds = 2, kProbes = 3;
// If something is in flight, the kernel would go on for a quarter of an hour. TCP_USER_TIMEOUT is made for this, but
// also ends the connection to a healthy peer that does not read for so long (its window is closed). So examine() looks
// itself.
constexpr uint32_t kUnacknowledgedMs = 10'000;  ///< data unacknowledged for so long: the host is gone
constexpr uint8_t kUnansweredProbes = 5;        // of a closed window; a healthy host answers each

constexpr int kPieces = 64;  // in one system call

constexpr int kClosed = 1 << 16;  // stored like an errno, and equal to none

void set(int socket, int level, int option, int value) {
  ::setsockopt(socket, level, option, &value, sizeof value);  // if it fails, the connection works, but less well
}

}  // namespace

SocketPipe::SocketPipe(Socket socket) : socket_(std::move(socket)) {
  set(socket_.get(), IPPROTO_TCP, TCP_NODELAY, 1);
  set(socket_.get(), SOL_SOCKET, SO_KEEPALIVE, 1);
  set(socket_.get(), IPPROTO_TCP, TCP_KEEPIDLE, kIdleSeconds);
  set(socket_.get(), IPPROTO_TCP, TCP_KEEPINTVL, kIntervalSeconds);
  set(socket_.get(), IPPROTO_TCP, TCP_KEEPCNT, kProbes);
}

void SocketPipe::end(int code) const noexcept {
  int none = 0;  // the first cause is kept
  end_.compare_exchange_strong(none, code, std::memory_order_relaxed);
}

void SocketPipe::end_of_stream() const noexcept {
  const int cause = write_error_.load(std::memory_order_relaxed);
  end(cause != 0 ? cause : kClosed);
}

size_t SocketPipe::write(const iovec* pieces, int n) noexcept {
  msghdr message{};
  message.msg_iov = const_cast<iovec*>(pieces);
  message.msg_iovlen = static_cast<size_t>(std::min(n, IOV_MAX));
  const ssize_t bytes = repeated([&] { return ::sendmsg(socket_.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT); });
  // The kernel reports a cause once; later calls get EPIPE.
  if (bytes < 0 && !is_passing(errno) && errno != EPIPE) write_error_.store(errno, std::memory_order_relaxed);
  if (bytes < 0 && errno == EFAULT) {
    end(EFAULT);
    finish();  // the frame stays incomplete, so the peer must not wait for the rest
  }
  return bytes > 0 ? static_cast<size_t>(bytes) : 0;
}

size_t SocketPipe::receive(const iovec* pieces, int n) noexcept {
  if (end_.load(std::memory_order_relaxed) != 0) return 0;
  const ssize_t bytes = repeated([&] { return ::readv(socket_.get(), pieces, n); });
  if (bytes == 0) end_of_stream();
  if (bytes < 0 && !is_passing(errno)) end(errno);
  return bytes > 0 ? static_cast<size_t>(bytes) : 0;
}

/// First the bytes that are read ahead. One system call takes the rest, and reads ahead.
size_t SocketPipe::read(const iovec* pieces, int n) noexcept {
  std::array<iovec, kPieces> rest;
  size_t moved = 0, asked = 0;
  int more = 0;
  for (int i = 0; i < n && more < kPieces - 1; ++i) {
    const size_t ahead = std::min(pieces[i].iov_len, end_of_buffer_ - begin_);
    if (ahead > 0) std::memcpy(pieces[i].iov_base, buffer_.data() + begin_, ahead);
    begin_ += ahead;
    moved += ahead;
    if (ahead == pieces[i].iov_len) continue;
    rest[more++] = {static_cast<std::byte*>(pieces[i].iov_base) + ahead, pieces[i].iov_len - ahead};
    asked += pieces[i].iov_len - ahead;
  }
  if (more > 0) {
    rest[more] = {buffer_.data(), kBuffer};
    const size_t got = receive(rest.data(), more + 1);
    begin_ = 0;
    end_of_buffer_ = got - std::min(got, asked);
    moved += std::min(got, asked);
  }
  return moved;
}

bool SocketPipe::peek(void* to, size_t bytes) noexcept {
  while (end_of_buffer_ - begin_ < bytes) {
    std::memmove(buffer_.data(), buffer_.data() + begin_, end_of_buffer_ - begin_);
    end_of_buffer_ -= std::exchange(begin_, 0);
    const iovec room{buffer_.data() + end_of_buffer_, kBuffer - end_of_buffer_};
    const size_t got = receive(&room, 1);
    if (got == 0) return false;
    end_of_buffer_ += got;
  }
  std::memcpy(to, buffer_.data() + begin_, bytes);
  return true;
}

void SocketPipe::drop(size_t bytes) noexcept { begin_ += bytes; }

bool SocketPipe::ended() const noexcept {
  if (end_.load(std::memory_order_relaxed) != 0) return true;
  std::byte byte;
  const ssize_t bytes = repeated([&] { return ::recv(socket_.get(), &byte, 1, MSG_PEEK | MSG_DONTWAIT); });
  if (bytes == 0) end_of_stream();
  if (bytes < 0 && !is_passing(errno)) end(errno);
  return bytes == 0 || end_.load(std::memory_order_relaxed) != 0;
}

std::string SocketPipe::why_ended() const {
  const int code = end_.load(std::memory_order_relaxed);
  switch (code) {
    case 0: return "has not ended";
    case kClosed: return "closed the connection";
    case ETIMEDOUT: return "its host does not answer any more (Connection timed out)";
    default: return std::strerror(code);
  }
}

bool SocketPipe::memory_gone() const noexcept { return end_.load(std::memory_order_relaxed) == EFAULT; }

void SocketPipe::finish() noexcept { ::shutdown(socket_.get(), SHUT_WR); }

void SocketPipe::close() noexcept {
  // If it were closed with unread bytes, the connection would be reset, and the peer would lose what it has not read
  // yet, such as a final error.
  socket_.discard();
  ::shutdown(socket_.get(), SHUT_RDWR);
}

bool SocketPipe::delivered() noexcept {
  int waiting = 0;
  if (end_.load(std::memory_order_relaxed) != 0 || ::ioctl(socket_.get(), SIOCOUTQ, &waiting) != 0) return true;
  if (waiting == 0) return true;
  // After a reset by the peer, the kernel still counts the bytes that were in flight, though no peer waits for them.
  tcp_info info{};
  socklen_t length = sizeof info;
  return ::getsockopt(socket_.get(), IPPROTO_TCP, TCP_INFO, &info, &length) == 0 && info.tcpi_state == TCP_CLOSE;
}

void SocketPipe::examine() const noexcept {
  tcp_info info{};
  socklen_t length = sizeof info;
  if (::getsockopt(socket_.get(), IPPROTO_TCP, TCP_INFO, &info, &length) != 0) return;
  const bool in_flight =
      info.tcpi_unacked > 0 && info.tcpi_retransmits > 0 && info.tcpi_last_ack_recv >= kUnacknowledgedMs;
  if (in_flight || info.tcpi_probes >= kUnansweredProbes) end(ETIMEDOUT);
}

}  // namespace ringlet
