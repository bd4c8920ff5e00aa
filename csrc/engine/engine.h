// What runs a group's collectives, whatever lies between its ranks; and what ended them, if something did.
//
// Contract: run() is a collective: all ranks make the same calls in the same order. It returns when this rank's output
// is complete and its tensors may be written again, or throws: Timeout at the call's deadline, PeerLost, InvalidUsage
// where ranks call different things, or the error that another rank reported. The first error poisons the group.
// Thread safety: run and leave from one thread at a time; the rest from any.
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "base/error.h"
#include "engine/call.h"
#include "engine/call_log.h"
#include "engine/p2p_transport.h"

namespace ringlet {

class Selector;
class Topology;

class Engine {
 public:
  Engine() = default;
  virtual ~Engine() = default;
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  virtual const char* transport() const noexcept = 0;
  virtual int rank() const noexcept = 0;
  virtual int world() const noexcept = 0;

  /// `background`: called from a progress thread, which must not take the processor from the rank's own computation.
  virtual void run(const Call& call, bool background) = 0;

  /// What `auto` means for a message of so many bytes (of the schedule's whole buffer) here: the same on every rank.
  /// `registered`: all ranks' tensors are.
  virtual const Algorithm& algorithm_for(Collective collective, size_t bytes, bool registered) const = 0;

  /// The rules that it goes by, and what schedules are made for (null: all ranks share a host). The same on all ranks.
  virtual const Selector& selector() const noexcept = 0;
  virtual const Topology* topology() const noexcept { return nullptr; }

  /// What carries its point-to-point messages.
  virtual P2pTransport& p2p() = 0;

  /// Whether peers can read [pointer, pointer + bytes) in place.
  virtual bool registered(const void* pointer, size_t bytes) const noexcept = 0;
  /// What collectives took in from peers, ever; what they gave out, where peers do not take it themselves.
  virtual uint64_t bytes_received() const noexcept = 0;
  virtual uint64_t bytes_sent() const noexcept { return 0; }
  /// TCP connections that stand.
  virtual int connections() const noexcept { return 0; }
  /// By rank: its host, numbered by first appearance.
  virtual const std::vector<int>& hosts() const noexcept = 0;

  /// What this rank called last.
  CallLog& calls() noexcept { return calls_; }
  const CallLog& calls() const noexcept { return calls_; }

  /// Throws the error that poisoned the group, if one did.
  virtual void raise_if_failed() = 0;
  virtual std::optional<ErrorKind> failure() const = 0;
  /// Outside of any call: throws what a peer has told of an error or of its end, which poisons the group.
  virtual void poll_failures() = 0;
  /// Poisons the group, tells the peers, and throws.
  [[noreturn]] virtual void fail(ErrorKind kind, const std::string& message) = 0;
  /// Ends all waits of this rank with an error.
  virtual void abort(const std::string& reason) = 0;
  /// The last call. `quiet`: nothing is pending; then what peers still need of this rank reaches them within
  /// `patience`. An interrupt (base/runtime.h) cuts that short, and goes on when this rank has left.
  virtual void leave(bool quiet, std::chrono::milliseconds patience) = 0;

 private:
  CallLog calls_;
};

}  // namespace ringlet
