// A socket that forked children do not hold: in them its number stands for an empty file.
//
// A child that a rank forks, such as a data loader's worker, would otherwise keep the rank's connections open after the
// rank is gone, and its peers would wait for it. Ownership: closes the socket. Thread safety: one thread at a time.
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

  /// Reads and forgets what has arrived; whether more may come.
  bool discard() const noexcept;

 private:
  int fd_;
};

}  // namespace ringlet
