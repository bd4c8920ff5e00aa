// An engine runs the collectives of a group, and carries the reports of the group's health.
//
// Contract: run() is a collective: all ranks make the same calls in the same order. It returns when this rank's output
// is complete and its tensors may be written again. It throws Timeout at the call's deadline, PeerLost, InvalidUsage if
// ranks make different calls, or the error that another rank reported. The first error poisons the group.
// Thread safety: run, advance and leave from one thread at a time; all else from any thread.
#pragma once

#include <chrono>
#include <vector>

#include "engine/call.h"
#include "engine/call_log.h"
#include "engine/health.h"
#include "engine/p2p.h"

namespace ringlet {

class Selector;
class Topology;

/// What a call that advance() has not completed waits for.
struct Awaited {
  int peer = -1;  ///< whose counter must reach the target; negative: bytes on one of the pipes
  uint64_t target = 0;
  std::vector<Mesh::Watch> pipes{};
};

class Engine {
 public:
  /// As Health's.
  Engine(int rank, int world, Health::Carrier& carrier, bool over_network)
      : health_(rank, world, calls_, carrier, over_network) {}
  virtual ~Engine() = default;
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  virtual const char* transport() const noexcept = 0;
  int rank() const noexcept { return health_.rank(); }
  int world() const noexcept { return health_.world(); }

  /// `background`: this is a progress thread, which must not take the processor from the rank's own computation.
  virtual void run(const Call& call, bool background) = 0;

  /// Continues a call until it is complete (true) or this rank must wait for a peer (false). `spin`: before it returns
  /// false, it looks as often as run() does before it sleeps. `awaited`: the caller sleeps next, until what this is set
  /// to. The first call of advance() begins the call. The caller keeps the Call in place until advance() returns true or
  /// throws, as run() does, and makes no other call meanwhile.
  virtual bool advance(const Call& call, bool spin, Awaited* awaited) = 0;
  /// Sleeps until that has come, or the time is over. Any threads may call it during advance().
  virtual void sleep(const Awaited& awaited, std::chrono::nanoseconds most) noexcept = 0;
  /// Whether a progress thread takes no processor from the rank's own computation.
  virtual bool overlaps() const noexcept = 0;
  /// Whether a peer sleeps until this rank makes progress. From any thread.
  virtual bool is_awaited() const noexcept { return false; }

  /// The choice of `auto` for that many bytes of the schedule's whole buffer: the same on every rank. `registered`:
  /// the tensors of all ranks are registered.
  virtual const Algorithm& algorithm_for(Collective collective, size_t bytes, bool registered) const = 0;

  /// The rules of `auto`, and the topology of the schedules (null: all ranks share a host). The same on all ranks.
  virtual const Selector& selector() const noexcept = 0;
  virtual const Topology* topology() const noexcept { return nullptr; }

  virtual P2p& p2p() = 0;

  /// Whether peers can read [pointer, pointer + bytes) in place.
  virtual bool registered(const void* pointer, size_t bytes) const noexcept = 0;
  /// Bytes that all collectives so far received from peers, and sent to them. An engine whose peers read its memory
  /// sends nothing.
  virtual uint64_t bytes_received() const noexcept = 0;
  virtual uint64_t bytes_sent() const noexcept { return 0; }
  /// Open TCP connections.
  virtual int connections() const noexcept { return 0; }
  /// By rank: its host, numbered by first appearance.
  virtual const std::vector<int>& host_of_rank() const noexcept = 0;

  /// The last calls of this rank.
  CallLog& calls() noexcept { return calls_; }
  const CallLog& calls() const noexcept { return calls_; }

  /// The group's first error, and what the peers have told.
  Health& health() noexcept { return health_; }
  const Health& health() const noexcept { return health_; }

  /// The last call. `quiet`: no call is pending. Then the engine waits at most `patience` until the peers have all that
  /// they need of this rank. An interrupt (base/interrupts.h) ends the wait early, and is thrown when this rank has
  /// left.
  virtual void leave(bool quiet, std::chrono::milliseconds patience) = 0;

 private:
  CallLog calls_;
  Health health_;
};

}  // namespace ringlet
