// A P2P transport moves messages from rank to rank: over segments of shared memory, or over streams.
//
// Contract: the messages of a pair in one direction are a queue: they arrive in the order in which they were sent, one
// at a time. Every call can be repeated and never waits, so one thread can move many messages (comm/messenger.h, which
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
#include "engine/health.h"
#include "transport/control.h"
#include "transport/mesh.h"

namespace ringlet {

inline constexpr int kAnySource = -1;
inline constexpr size_t kAtOnce = size_t{512} << 10;  // a limit, so that no message delays the others

struct Message {
  int peer;  ///< a receive from kAnySource takes the first message that comes
  bool sending;
  DType dtype;
  size_t count;
  std::byte* data;  ///< read when sending, written when receiving
  std::chrono::milliseconds timeout;
  int64_t tag = 0;  ///< a receive takes only a message of the same tag

  size_t bytes() const { return count * element_size(dtype); }
};

/// The header of a message, known before the message is received.
struct Envelope {
  DType dtype;
  uint64_t count;
  int64_t tag;

  size_t bytes() const { return count * element_size(dtype); }
  /// Whether a peer's numbers are those of a message.
  static bool is_possible(uint64_t dtype, uint64_t count) {
    return dtype < kDTypes && count <= PTRDIFF_MAX / element_size(static_cast<DType>(dtype));
  }
};

/// How far a message is.
struct MessageProgress {
  size_t bytes = 0;
  bool started = false;
  bool in_place = false;
};

/// What ends the sleep of a thread.
struct Watchlist {
  std::vector<Watched> words;
  std::vector<Mesh::Watch> pipes;
};

class P2pTransport {
 public:
  explicit P2pTransport(Health& health) : health_(health) {}
  virtual ~P2pTransport() = default;
  P2pTransport(const P2pTransport&) = delete;
  P2pTransport& operator=(const P2pTransport&) = delete;

  int rank() const { return health_.rank(); }
  int world() const { return health_.world(); }
  Health& health() const { return health_; }
  virtual int spins(bool background) const = 0;

  /// Sends while there is room, at most about kAtOnce bytes. Returns whether the message is complete.
  virtual bool send(const Message& message, MessageProgress& progress) = 0;
  /// The envelope of the next message from `peer`; none if it has not arrived. Do not call it while receive() has taken
  /// only part of a message.
  virtual std::optional<Envelope> next(int peer) = 0;
  /// Takes the bytes that have arrived, at most about kAtOnce. Returns whether the message is complete.
  virtual bool receive(int peer, std::byte* to, size_t bytes, MessageProgress& progress) = 0;

  /// Adds to `list` what changes when there is room to send to `peer`, or when more arrives from it. After this call,
  /// try once more before sleep().
  virtual void watch(int peer, bool sending, Watchlist& list) = 0;
  virtual void sleep(const Watchlist& list, int64_t nanoseconds) = 0;

  /// Throws if the wait for a message cannot end well (Health::examine).
  virtual void examine(Waiting& waiting, Health::Look look) { health_.examine(waiting, look); }

 private:
  Health& health_;
};

}  // namespace ringlet
