// The pipes of one group: rings in shared memory within a host, TCP between hosts. open() makes a pipe at first use.
//
// Contract: either side may open a pipe, of every kind; a pair has one connection per kind. Handshakes run on the
// listener of the process (transport/listener.h), so open() never waits.
// Sleeping: call about_to_sleep, look at every pipe once more, then sleep. Each kind has its own wakeup: a thread that
// watches pipes of several kinds calls about_to_sleep for each.
// Ownership: owns the pipes, which stay readable objects as long as it lives. The listener outlives it. The engine that
// has `local`, too, departs from it after close().
// Thread safety: one thread at a time per kind; sleep, ring, find and the counters from any thread; close while no
// thread moves bytes or sleeps.
#pragma once

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
    std::vector<std::string> addresses{};  ///< by rank: address() of its process; of one host: none
    std::string group{};                   ///< its name, for the log
    std::vector<int> hosts{};              ///< by rank: equal if `local` joins them; all different without it
    /// Between the ranks of this rank's host in ascending order, with rings for all kinds of connection unless it joins
    /// all ranks; may be null.
    std::shared_ptr<Transport> local{};
    size_t timed_copy_bytes = SIZE_MAX;  ///< of its rings (transport/ring_pipe.h)
  };

  /// Throws InvalidUsage if the setup contradicts itself, ResourceError.
  explicit Mesh(Setup setup);
  ~Mesh();
  Mesh(const Mesh&) = delete;
  Mesh& operator=(const Mesh&) = delete;

  /// The address of this process, for the peers' Setup::addresses; `store` is as for own_addresses().
  static std::string address(const std::string& store = "");

  int rank() const;
  int world() const;
  Transport* local() const;  ///< null if this rank is alone on its host

  /// The pipe. The first call starts the connection; until it is complete, the result is null. Throws PeerLost or
  /// ResourceError if the connection cannot be made. A peer that cannot be reached ends `collectives` only: open that
  /// kind, too.
  Pipe* open(int peer, ConnectionKind which);
  /// The pipe, if the connection is complete; null otherwise.
  Pipe* find(int peer, ConnectionKind which) const noexcept;

  /// Whether the peer has closed a pipe, or its process is gone. Bytes that it sent may still be unread. `receiving`:
  /// if there is a pipe for messages, only its end counts. The pipes of a peer are connections of their own, so a
  /// message may arrive after the end of another pipe.
  bool gone(int peer, bool receiving) const noexcept;

  struct Watch {
    const Pipe* pipe;
    bool reading;  ///< wakes when bytes arrive
    bool writing;  ///< wakes when there is room again
  };
  /// From now on, peers in shared memory signal the wakeup when they have written or read.
  void about_to_sleep(ConnectionKind which) noexcept;
  /// Sleeps until a peer signals the wakeup of that kind, one of the pipes is ready or ends, a pipe was made, or the time
  /// is over. If several threads sleep on one kind, one may take the wakeup from the others: keep their times short.
  void sleep(ConnectionKind which, std::span<const Watch> watches, int64_t nanoseconds) noexcept;
  /// Wakes all threads that sleep, on all kinds of connection.
  void wake_all() noexcept;

  /// Open TCP connections.
  int connections() const noexcept;

  /// From now on no pipe is made. A peer that still opens one to this rank, of kind `collectives`, reads `final_frame`
  /// and then the end. If it is empty, the handshake tells the peer that this rank has left.
  void retire(std::vector<std::byte> final_frame) noexcept;
  /// Whether the peers have read all that was written, as far as this rank can know, or will never read it.
  bool delivered() const noexcept;
  /// Ends all pipes. Bytes that were written still arrive: those in a ring whenever the peer reads them, those in a
  /// connection if they reach the peer's host before `deadline`. An interrupt ends this wait early, and is thrown when
  /// all pipes have ended. If the deadline has passed already, it is not thrown.
  void close(const Deadline& deadline);

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace ringlet
