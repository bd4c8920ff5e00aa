// One group's pipes to its peers: made when first asked for, rings in shared memory inside a host, TCP between hosts.
//
// Contract: either side may ask first; a pair has one connection per lane, whoever dialled. Handshakes run on the
// process's door (transport/door.h), so that open() never waits. Lane `collectives` carries both directions; a message
// lane carries one: `outgoing` here is `incoming` at the peer, and only `outgoing` is ever dialled.
// Sleeping: call about_to_sleep, look at every pipe once more, then sleep; each lane has its own bell, so who watches
// pipes of several lanes announces each of them.
// Ownership: owns the pipes, which stay readable objects until it goes; the process's door outlives it.
// Thread safety: one thread at a time per lane; sleep, ring, find and the counters from any; close while nobody moves
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

class Wires {
 public:
  struct Setup {
    int rank = 0;
    int world = 1;
    Token key{};                       ///< the group's secret, the same on all ranks, never used before
    std::vector<std::string> cards{};  ///< by rank: card() of its process
    std::string group{};               ///< its name, for the log
    std::vector<int> hosts{};          ///< by rank: equal where `local` joins them; all different without it
    /// From connect_with_bells, between the ranks of this rank's host in ascending order; may be null.
    std::unique_ptr<Transport> local{};
  };

  /// Throws InvalidUsage where the setup contradicts itself, SystemError.
  explicit Wires(Setup setup);
  ~Wires();
  Wires(const Wires&) = delete;
  Wires& operator=(const Wires&) = delete;

  /// Where this process can be reached: what the others need in Setup::cards.
  static std::string card();

  int rank() const;
  int world() const;

  /// The pipe; null while it is being made, which asking starts. Asking for `incoming`, which only the peer can start,
  /// opens `collectives` in its place, whose end tells that nothing will come. Throws PeerLost or SystemError where it
  /// cannot be.
  Pipe* open(int peer, Lane lane);
  /// The pipe if it is there.
  Pipe* find(int peer, Lane lane) const noexcept;

  /// Whether the peer has closed a pipe that stood, or its process is gone; what it sent may still be unread.
  bool gone(int peer) const noexcept;

  struct Watch {
    const Pipe* pipe;
    bool reading;  ///< wakes when something arrives
    bool writing;  ///< wakes when there is room again
  };
  /// From now on peers in shared memory ring the bell when they have written or read.
  void about_to_sleep(Lane lane) noexcept;
  /// Until the bell of that lane rings, something happens at one of the pipes, a pipe was made, or the time is over. Of
  /// several threads that sleep on a lane, one may take the bell from the others: their time should be short.
  void sleep(Lane lane, std::span<const Watch> watches, int64_t nanoseconds) noexcept;
  /// Wakes whoever sleeps, on all lanes.
  void ring() noexcept;

  /// Payload and headers, both ways, over sockets and rings, ever.
  uint64_t bytes_sent() const noexcept;
  uint64_t bytes_received() const noexcept;
  /// TCP connections that stand.
  int connections() const noexcept;

  /// From now on no pipe is made. Who still opens one to this rank, on lane `collectives`, reads `last_words` there and
  /// then the end, or is told that this rank has left where there are none.
  void retire(std::vector<std::byte> last_words) noexcept;
  /// Ends all pipes: what was written still arrives, if the peers read it before `deadline`. Nothing is asked of them any
  /// more but how much went through. An interrupt cuts that short, and is thrown when all have ended; not where the
  /// deadline has passed already.
  void close(const Deadline& deadline);

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace ringlet
