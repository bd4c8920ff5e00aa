#include "transport/socket.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstddef>
#include <mutex>
#include <set>
#include <utility>

#include "base/process.h"
#include "base/system_call.h"

namespace ringlet {
namespace {

struct Registry {
  /// Since before the fork no socket has been closed, so every number in the list is still that socket.
  void in_child() {
    const int nothing = ::open("/dev/null", O_RDWR | O_CLOEXEC);
    for (const int socket : sockets) {
      repeated([&] { return ::dup3(nothing, socket, O_CLOEXEC); });
    }
    ::close(nothing);
  }

  std::mutex mutex;
  std::set<int> sockets;  // guarded by mutex
};
Registry& registry = kept_at_fork<Registry>();

}  // namespace

Socket::Socket(int fd) : fd_(fd) {
  if (fd_ < 0) return;
  const std::lock_guard lock(registry.mutex);
  try {
    registry.sockets.insert(fd_);
  } catch (const std::bad_alloc&) {
    ::close(fd_);
    throw;
  }
}

Socket::Socket(Socket&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}

Socket& Socket::operator=(Socket&& other) noexcept {
  std::swap(fd_, other.fd_);
  return *this;
}

Socket::~Socket() {
  if (fd_ < 0) return;
  const std::lock_guard lock(registry.mutex);
  registry.sockets.erase(fd_);
  ::close(fd_);
}

bool Socket::discard() const noexcept {
  std::array<std::byte, 16384> bytes;
  ssize_t n = 1;
  while (n > 0) n = repeated([&] { return ::recv(fd_, bytes.data(), bytes.size(), MSG_DONTWAIT); });
  return n < 0 && is_passing(errno);
}

}  // namespace ringlet
