// A pipe: bytes to and from one peer, in order, both directions at once, never waiting.
//
// What is behind it, a socket or a ring in shared memory, makes no difference to those who move bytes through it.
// Ownership: Wires owns all pipes of a group. Thread safety: one thread at a time per pipe and direction.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <string>

namespace ringlet {

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

  /// Nothing more will be written: the peer reads what was, then sees the end.
  virtual void finish() noexcept = 0;

  /// What poll() watches on its behalf.
  virtual int descriptor() const noexcept = 0;
};

}  // namespace ringlet
