// A socket that a forked child does not inherit: in the child its number is an empty file.
//
// Otherwise a child of a rank, such as the worker of a data loader, would keep the rank's connections open after the
// rank is gone, and the peers would wait for the rank. Ownership: closes the socket. Thread safety: one thread at a
// time.
#pragma once

namespace ringlet {

class Socket {
 public:
  explicit Socket(int fd = -1);
  Socket(Socket&& other) noexcept;
  Socket& operator=(Socket&& other) noexcept;
  ~Socket();

  int get() const { return fd_; }
  bool valid() const { return fd_ >= 0; }

  /// Reads and discards the bytes that have arrived. Returns whether more may come.
  bool discard() const noexcept;

 private:
  int fd_;
};

}  // namespace ringlet
