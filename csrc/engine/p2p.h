// Point-to-point messages go over pipes, one frame each. Between ranks of one host a frame may say where a message lies,
// which the receiver then reads there.
//
// Contract: the messages of a pair in one direction are a queue: they arrive in the order in which they were sent, one
// at a time. Every call can be repeated and never waits, so one thread can move many messages (comm/messenger.h, which
// also matches tags). A message is complete at its sender when its tensor may be written again.
// Ownership: mesh and health outlive it. Thread safety: one thread at a time; sleep from any.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "base/dtype.h"
#include "engine/health.h"
#include "engine/message/frame.h"
#include "transport/mesh.h"

namespace ringlet {

inline constexpr int kAnySource = -1;

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

class P2p {
 public:
  /// What ends the sleep of a thread.
  using Watchlist = std::vector<Mesh::Watch>;

  /// `spins`: looks of a waiting thread before it yields its processor.
  P2p(Mesh& mesh, Health& health, int spins)
      : mesh_(mesh), health_(health), spins_(spins), connections_(static_cast<size_t>(mesh.world())) {}
  virtual ~P2p() = default;
  P2p(const P2p&) = delete;
  P2p& operator=(const P2p&) = delete;

  int rank() const { return health_.rank(); }
  int world() const { return health_.world(); }
  Health& health() const { return health_; }
  int spins() const { return spins_; }

  /// Sends while there is room. Returns whether the message is complete.
  bool send(const Message& message, MessageProgress& progress);
  /// The envelope of the next message from `peer`; none if it has not arrived. Do not call it while receive() has taken
  /// only part of a message.
  std::optional<Envelope> next(int peer);
  /// Takes the bytes that have arrived. Returns whether the message is complete.
  bool receive(int peer, std::byte* to, size_t bytes, MessageProgress& progress);

  /// Adds to `list` what changes when there is room to send to `peer`, or when more arrives from it. After this call,
  /// try once more before sleep().
  void watch(int peer, bool sending, Watchlist& list);
  void sleep(const Watchlist& list, int64_t nanoseconds) { mesh_.sleep(ConnectionKind::messages, list, nanoseconds); }
  /// Wakes the threads that sleep.
  void wake() { mesh_.wake_all(); }

  /// Throws if the wait for a message cannot end well (Health::examine).
  virtual void examine(Waiting& waiting, Health::Look look) { health_.examine(waiting, look); }

 protected:
  /// The pipe to `peer`, made at first use; null until it is there.
  virtual Pipe* open(int peer) { return mesh_.open(peer, ConnectionKind::messages); }
  /// Where the peer may read a message in place; none if it must be copied.
  virtual std::optional<uint64_t> locate(int, const Message&) const { return std::nullopt; }
  /// Copies what lies there in the memory of `peer`. Throws if the peer may have changed it, or if this rank cannot read
  /// it. `context` as in Waiting.
  virtual void read_in_place(int peer, uint64_t address, std::byte* to, size_t bytes,
                             const std::function<std::string()>& context);

  Mesh& mesh_;

 private:
  struct Connection {
    explicit Connection(Pipe& pipe) : pipe(pipe), writer(pipe), reader(pipe) {}
    Pipe& pipe;
    FrameWriter writer;
    FrameReader reader;
    bool opened = false;  // by this rank, for sending
  };
  Connection* connection_to(int peer);
  Connection* connection_from(int peer);
  [[noreturn]] void fail_for_memory(const char* call, int peer);

  Health& health_;
  const int spins_;
  std::vector<std::optional<Connection>> connections_;  // by peer
};

}  // namespace ringlet
