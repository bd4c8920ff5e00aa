// A pipe over a TCP connection.
//
// It notices a host that vanishes: by keep-alive if no bytes are in flight, by examine() if some are.
// Ownership: owns the socket. Thread safety: as Pipe; the counters from any thread.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

#include "transport/pipe.h"
#include "transport/socket.h"

namespace ringlet {

class SocketPipe final : public Pipe {
 public:
  explicit SocketPipe(Socket socket);

  size_t write(const iovec* pieces, int n) noexcept override;
  size_t read(const iovec* pieces, int n) noexcept override;
  bool peek(void* to, size_t bytes) noexcept override;
  void drop(size_t bytes) noexcept override;
  /// The socket has ended. Bytes that peek() or read() has read ahead may be unread.
  bool ended() const noexcept override;
  /// Whether a call has found so before; this one looks at nothing.
  bool known_to_have_ended() const noexcept { return end_.load(std::memory_order_relaxed) != 0; }
  std::string why_ended() const override;
  bool memory_gone() const noexcept override;
  void finish() noexcept override;
  void close() noexcept override;
  int descriptor() const noexcept override { return socket_.get(); }
  /// Whether the peer's kernel has all that was written, or never will have it.
  bool delivered() noexcept override;

  /// Ends the pipe if the peer's host has not acknowledged bytes for too long. Costs a system call.
  void examine() const noexcept;

 private:
  static constexpr size_t kBuffer = 4096;  // holds small frames whole

  size_t receive(const iovec* pieces, int n) noexcept;
  void end(int code) const noexcept;
  void end_of_stream() const noexcept;

  Socket socket_;
  mutable std::atomic<int> end_{0};       // an errno, or kClosed
  std::atomic<int> write_error_{0};       // an errno; there may still be bytes to read
  size_t begin_ = 0, end_of_buffer_ = 0;  // of the bytes that are read ahead
  std::array<std::byte, kBuffer> buffer_;
};

}  // namespace ringlet
