// The failure protocol of the message engine: what a rank knows of failures in its group, and what it does about them.
//
// The protocol has a state, and its functions are its events (docs/failure.md draws both). An event changes the state,
// sends a report, or throws the error that ends the call in progress. The protocol knows no pipes: it acts through its
// Owner, so a test drives it without sockets.
// Ownership: calls and owner outlive it. Thread safety: raise_if_failed, failure, poison, fail and abort from any
// thread; all else from the thread that holds the owner's pipes.
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "engine/call_log.h"
#include "engine/failure.h"
#include "engine/message/frame.h"

namespace ringlet {

inline constexpr char kMemoryGone[] =
    "the memory of this call's tensor is gone: it was unmapped or freed while the call used it";

class FailureProtocol {
 public:
  using Clock = Deadline::Clock;

  enum class State : uint8_t {
    healthy,
    warned,  ///< a peer failed in a later call: the call in progress may complete, the next call raises that error
    failed,  ///< the first error is kept, and every later call raises it
    left,    ///< this rank has said goodbye
  };

  /// The engine that the protocol belongs to.
  class Owner {
   public:
    /// "rank 0 of 2 in broadcast #3 (tree, ...), 0 of 4 bytes done"; outside of a call the rank only.
    virtual std::string context() const = 0;
    /// Whether the call in progress still needs that peer.
    virtual bool awaits(int peer) const = 0;
    /// The peer that the oldest work in progress waits for; -1: none.
    virtual int awaited() const = 0;
    /// The next frame of a peer, if it belongs to a call that this rank has not made yet; null otherwise.
    virtual const FrameHeader* frame_ahead(int peer) = 0;
    /// Reads the reports that have arrived: calls on_report().
    virtual void read_reports() = 0;
    /// The same, and then looks for connections that have ended: calls on_closed().
    virtual void poll_peers() = 0;
    /// Sends a report beside the data, to all peers that are connected.
    virtual void say(const FrameHeader& header, const std::string& text) = 0;
    /// Queues the final error of this rank, or its goodbye, for all peers; flush() sends it instead of the data. Neither
    /// needs memory: without any, the peers read kOutOfMemory, or the end of the connection.
    virtual void post(const FrameHeader& header, const std::string& text) noexcept = 0;
    virtual void flush() noexcept = 0;

   protected:
    ~Owner() = default;
  };

  FailureProtocol(int rank, int world, CallLog& calls, Owner& owner)
      : rank_(rank), calls_(calls), owner_(owner), peers_(static_cast<size_t>(world)) {}

  State state() const {
    return left_ ? State::left : failure_.failed() ? State::failed : reported_ ? State::warned : State::healthy;
  }
  bool has_left(int peer) const { return peers_[peer].left; }
  std::optional<ErrorKind> failure() const { return failure_.kind(); }
  void raise_if_failed() const { failure_.raise_if_failed(); }

  /// Before a call: throws the error that ended the group, or one that a peer has reported since the last call.
  void enter_call();
  /// `header`: what all frames of the call say of it.
  void begin_call(const FrameHeader& header, std::chrono::milliseconds timeout, Clock::time_point now);
  void end_call();
  /// The call in progress has failed.
  void abandon_call() { in_call_ = false; }

  /// A message of that peer begins to arrive; it belongs to the peer's call number `call`.
  void on_data(int peer, uint64_t call) { peers_[peer].call = call; }
  /// A message of that peer is complete: the peer does not wait for this rank any more.
  void on_message(int peer);
  void on_report(int peer, const FrameHeader& header, const std::string& text);
  /// The connection to that peer has ended because of `why`, and all its frames are read. `memory_gone`: the connection
  /// ended because the memory of this call's tensor is not mapped any more.
  void on_closed(int peer, bool memory_gone, const std::string& why);
  /// No bytes have moved for some time.
  void on_idle(Clock::time_point now);

  /// Fails the group and tells the peers. Returns the text of the error that this rank raises. Needs no memory.
  std::string poison(ErrorKind kind, const std::string& message) noexcept {
    return poison(kind, message, rank_, message);
  }
  [[noreturn]] void fail(ErrorKind kind, const std::string& message);
  void abort(const std::string& reason);
  void leave() { left_ = true; }

  /// Tells the peers in which message this rank has waited for a long time; "": in none.
  void say_message(const std::string& context);
  /// For an error: the calls in which other ranks have waited for a long time. Of collectives only those of `peer`; all
  /// if it is negative.
  std::string waiting_as_well(int peer);

 private:
  /// The rank that delays a call, and whether that rank has made the call at all.
  struct Suspect {
    int rank = -1;
    bool in_call = false;
    bool operator==(const Suspect&) const = default;
  };
  struct Peer {
    bool left = false;                          // the peer said goodbye, or reported an error
    uint64_t call = 0;                          // the last call in which this rank received a frame of the peer
    Suspect suspects{};                         // the rank that the peer waits for
    std::string in_collective{}, in_message{};  // the calls in which the peer has waited for a long time
  };
  /// What a peer reported of a failure, and the rank in which the failure began.
  struct Reported {
    ErrorKind kind;
    int origin;
    std::string text;
  };

  Suspect straggler() const;
  void report(const Suspect& suspect);
  std::string call_of(int peer, const FrameHeader& header) const;
  std::string poison(ErrorKind kind, const std::string& message, int origin, const std::string& text) noexcept;
  [[noreturn]] void forward_failure();
  [[noreturn]] void lose(int peer, const std::string& why);
  [[noreturn]] void time_out();

  const int rank_;
  CallLog& calls_;
  Owner& owner_;
  Failure failure_;
  std::vector<Peer> peers_;
  std::optional<Reported> reported_;
  bool left_ = false;
  std::string said_message_;

  // Of the call in progress; call_ of the last one, too.
  bool in_call_ = false;
  FrameHeader call_{};
  Clock::time_point began_{};
  std::chrono::milliseconds timeout_{0};
  std::optional<Suspect> said_;  // the suspect that this rank last reported to its peers
};

}  // namespace ringlet
