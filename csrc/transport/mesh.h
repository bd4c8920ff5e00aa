// One group's pipes to its peers: made when first asked for, rings in shared memory inside a host, TCP between hosts.
//
// Contract: either side may ask first; a pair has one connection per kind, whoever initiated it. Handshakes run on the
// process's listener (transport/listener.h), so that open() never waits. ConnectionKind `collectives` carries both
// directions; a message kind carries one: `outgoing` here is `incoming` at the peer, and only the `outgoing` end ever
// connects.
// Sleeping: call about_to_sleep, look at every pipe once more, then sleep; each kind has its own wakeup, so who watches
// pipes of several kinds of connection announces each of them.
// Ownership: owns the pipes, which stay readable objects until it goes; the process's listener outlives it.
// Thread safety: one thread at a time per kind; sleep, ring, find and the counters from any; close while nobody moves
// bytes or sleeps.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "transport/pipe.h"
#include "transport/token.h"
#include "transport/transport.h"

namespace ringlet {

class Mesh {
 public:
  struct Setup {
    int rank = 0;
    int world = 1;
    Token key{};                           ///< the group's secret, the same on all ranks, never used before
    std::vector<std::string> addresses{};  ///< by rank: address() of its process
    std::string group{};                   ///< its name, for the log
    std::vector<int> hosts{};              ///< by rank: equal where `local` joins them; all different without it
    /// From connect_with_wakeups, between the ranks of this rank's host in ascending order; may be null.
    std::unique_ptr<Transport> local{};
  };

  /// Throws InvalidUsage where the setup contradicts itself, SystemError.
  explicit Mesh(Setup setup);
  ~Mesh();
  Mesh(const Mesh&) = delete;
  Mesh& operator=(const Mesh&) = delete;

  /// Where this process can be reached: what the others need in Setup::addresses.
  static std::string address();

  int rank() const;
  int world() const;

  /// The pipe; null while it is being made, which asking starts. Asking for `incoming`, which only the peer can start,
  /// opens `collectives` in its place, whose end tells that nothing will come. Throws PeerLost or SystemError where it
  /// cannot be.
  Pipe* open(int peer, ConnectionKind which);
  /// The pipe if it is there.
  Pipe* find(int peer, ConnectionKind which) const noexcept;

  /// Whether the peer has closed a pipe that stood, or its process is gone; what it sent may still be unread.
  bool gone(int peer) const noexcept;

  struct Watch {
    const Pipe* pipe;
    bool reading;  ///< wakes when something arrives
    bool writing;  ///< wakes when there is room again
  };
  /// From now on peers in shared memory signal the wakeup when they have written or read.
  void about_to_sleep(ConnectionKind which) noexcept;
  /// Until the wakeup of that kind is signalled, something happens at one of the pipes, a pipe was made, or the time is
  /// over. Of several threads that sleep on a kind, one may take the wakeup from the others: their time should be
  /// short.
  void sleep(ConnectionKind which, std::span<const Watch> watches, int64_t nanoseconds) noexcept;
  /// Wakes whoever sleeps, on all kinds of connection.
  void ring() noexcept;

  /// Payload and headers, both ways, over sockets and rings, ever.
  uint64_t bytes_sent() const noexcept;
  uint64_t bytes_received() const noexcept;
  /// TCP connections that stand.
  int connections() const noexcept;

  /// From now on no pipe is made. Who still opens one to this rank, on kind `collectives`, reads `final_frame` there
  /// and then the end, or is told that this rank has left where there are none.
  void retire(std::vector<std::byte> final_frame) noexcept;
  /// Ends all pipes: what was written still arrives, if the peers read it before `deadline`. Nothing is asked of them
  /// any more but how much went through. An interrupt cuts that short, and is thrown when all have ended; not where the
  /// deadline has passed already.
  void close(const Deadline& deadline);

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace ringlet
