// A pipe: bytes to and from one peer, in order, both directions at once, never waiting.
//
// What is behind it, a socket or a ring in shared memory, makes no difference to those who move bytes through it.
// Ownership: Mesh owns all pipes of a group. Thread safety: one thread at a time per pipe and direction.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <string>

namespace ringlet {

/// What a pipe is for: a pair has one of each.
enum class ConnectionKind : uint8_t { collectives, outgoing, incoming };
inline constexpr int kConnectionKinds = 3;

class Pipe {
 public:
  virtual ~Pipe() = default;

  /// Takes bytes from `pieces`, in order, as many as there is room for; how many.
  virtual size_t write(const iovec* pieces, int n) noexcept = 0;

  /// Fills `pieces`, in order, with bytes that have arrived; how many.
  virtual size_t read(const iovec* pieces, int n) noexcept = 0;

  /// The peer closed it or is gone, and all that arrived before has been read. Then why, for people.
  virtual bool ended() const noexcept = 0;
  virtual std::string why_ended() const = 0;
  /// It ended on this side: the memory that it was to take bytes from, or to put them into, is not there.
  virtual bool memory_gone() const noexcept { return false; }

  /// Nothing more will be written or read: the peer reads what was, then sees the end; what it still writes goes
  /// nowhere, and it need not wait for that.
  virtual void finish() noexcept = 0;

  /// Whether the peer has all that was written, as far as this side can know, or will never have it.
  virtual bool delivered() noexcept = 0;

  /// Lets go of the connection.
  virtual void close() noexcept = 0;

  /// What poll() watches on its behalf.
  virtual int descriptor() const noexcept = 0;

  virtual uint64_t bytes_written() const noexcept = 0;
  virtual uint64_t bytes_read() const noexcept = 0;
};

}  // namespace ringlet
