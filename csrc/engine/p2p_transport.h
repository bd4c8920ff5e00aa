// How messages get from rank to rank: the same few steps over segments of shared memory and over streams.
//
// Contract: a pair's messages of one direction are a queue: messages arrive in the order in which they were put in, one
// at a time. Steps are resumable and never wait, so that one thread can move many messages (comm/messenger.h, which
// also matches tags). A message is complete at its sender when its tensor may be written again.
// Thread safety: one thread at a time; sleep from any.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "base/dtype.h"
#include "base/error.h"
#include "engine/pull/wait.h"
#include "transport/control.h"
#include "transport/mesh.h"

namespace ringlet {

inline constexpr int kAnySource = -1;
inline constexpr size_t kAtOnce = size_t{512} << 10;  // so that no message holds up the others, or who started it

struct Message {
  int peer;  ///< when receiving, kAnySource takes whichever comes first
  bool sending;
  DType dtype;
  size_t count;
  std::byte* data;  ///< read when sending, written when receiving
  std::chrono::milliseconds timeout;
  int64_t tag = 0;  ///< a receive takes only a message of the same tag

  size_t bytes() const { return count * element_size(dtype); }
};

/// What a message says of itself before it is taken.
struct Envelope {
  DType dtype;
  uint64_t count;
  int64_t tag;

  size_t bytes() const { return count * element_size(dtype); }
};

/// How far one message is.
struct MessageProgress {
  size_t bytes = 0;
  bool started = false;
  bool in_place = false;
};

/// What may change while a thread sleeps.
struct Watchlist {
  std::vector<Watched> words;
  std::vector<Mesh::Watch> pipes;
};

class P2pTransport {
 public:
  P2pTransport() = default;
  virtual ~P2pTransport() = default;
  P2pTransport(const P2pTransport&) = delete;
  P2pTransport& operator=(const P2pTransport&) = delete;

  virtual int rank() const = 0;
  virtual int world() const = 0;
  virtual int spins(bool background) const = 0;

  /// Puts out what there is room for, at most about kAtOnce bytes; true once the message is complete.
  virtual bool send(const Message& message, MessageProgress& progress) = 0;
  /// The message that comes next from `peer`; none while it has not arrived. Not while one is being taken.
  virtual std::optional<Envelope> next(int peer) = 0;
  /// Takes what has arrived of it, at most about kAtOnce bytes; true once it is complete.
  virtual bool receive(int peer, std::byte* to, size_t bytes, MessageProgress& progress) = 0;

  /// Adds to a list what changes when there is room for more to `peer`, or more arrives from it. Then look once more.
  virtual void watch(int peer, bool sending, Watchlist& list) = 0;
  virtual void sleep(const Watchlist& list, int64_t nanoseconds) = 0;

  /// Tells the peers in which message this rank has waited for long; "": in none. Best effort.
  virtual void tell_waiting(const std::string& context) = 0;

  /// Throws what ends a wait, if something does. `closely`: even what takes system calls to find out.
  virtual void examine(const Waiting& waiting, const Deadline& deadline, bool closely) = 0;
  virtual void raise_if_failed() = 0;
  [[noreturn]] virtual void fail(ErrorKind kind, const std::string& message) = 0;
};

}  // namespace ringlet
