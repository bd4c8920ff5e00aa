// The health of a group, as one rank sees it: the first error, who has been told of it, and who delays whom.
//
// Engines carry reports and describe their waits; this object decides how a wait ends, and writes the words of its
// error. transitions() is the whole protocol, and docs/failure.md has the same table. It knows neither pipes nor memory:
// it acts through a Carrier, so a test drives it alone. A repair of the group (shrink, agree) is to be an event with
// rows of its own: what a survivor knows of the others is here.
// Ownership: calls and carrier outlive it. Thread safety: begin_call, end_call, abandon_call, and examine() of a
// collective from the thread that makes the call; all else from any thread.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <exception>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/deadline.h"
#include "base/error.h"
#include "base/interrupts.h"
#include "base/process.h"
#include "engine/failure.h"

namespace ringlet {

class CallLog;

inline constexpr char kMemoryGone[] =
    "the memory of this call's tensor is gone: it was unmapped or freed while the call used it";

/// The rank that delays a call, and whether that rank has made the call at all.
struct Suspect {
  int rank = -1;
  bool in_call = false;
  bool operator==(const Suspect&) const = default;
};

/// A wait, as the engine that waits describes it.
struct Waiting {
  int peer = -1;  ///< negative: any, or several
  std::chrono::milliseconds timeout{0};
  Deadline::Clock::time_point began = Deadline::Clock::now();
  std::function<bool()> reached{};         ///< a last look before the wait fails; empty: the engine has looked
  std::function<void()> check{};           ///< throws if the engine knows why the wait cannot end; may be empty
  std::function<bool(int)> awaits{};       ///< whether the wait ends badly if that peer leaves; empty: `peer` says it
  std::function<Suspect()> straggler{};    ///< in a collective; empty: unknown
  bool message = false;                    ///< of a message; else of a collective
  bool receiving = false;                  ///< of a message that is received
  std::function<std::string()> context{};  ///< "rank 0 of 4 in all_reduce #3 (...), round 1, ..."
};

/// Whether the deadline of a wait that began then has passed.
inline bool is_late(Deadline::Clock::time_point began, std::chrono::milliseconds timeout,
                    Deadline::Clock::time_point now) {
  return now - began >= std::clamp(timeout, -kLongestTimeout, kLongestTimeout);
}

class Health {
 public:
  using Clock = Deadline::Clock;

  enum class State : uint8_t {
    healthy,  ///< no failure is known
    warned,   ///< a peer reported an error that this rank has not raised: the call in progress may still complete
    failed,   ///< the first error is kept, and every later call raises it
    left,     ///< this rank has said goodbye
  };
  enum class Event : uint8_t {
    error,        ///< a peer reports an error in this rank's call or an earlier one, or while this rank is in no call
    later_error,  ///< a peer reports an error in a call that this rank has not made yet
    goodbye,      ///< a peer leaves
    lost,         ///< this rank needs a peer that has left or is gone, or a peer is gone that has not left
    late,         ///< the deadline of a wait has passed
    own_error,    ///< this rank fails by itself, in whatever thread
    abort,        ///< the program ends the group's calls
    call,         ///< this rank makes its next call
    leave,        ///< this rank leaves the group
  };
  static constexpr size_t kEvents = static_cast<size_t>(Event::leave) + 1;
  enum class Act : uint8_t {
    nothing,
    note,         ///< keeps what the peer said
    report,       ///< tells the peers this rank's error, keeps it if it is the first, and raises it
    forward,      ///< tells the peers the reported error, as that of the rank where it began, keeps it and raises it
    raise_first,  ///< raises the error that is kept, if there is one
    say_goodbye,  ///< tells the peers that this rank makes no more calls
  };
  struct Transition {
    State from;
    Event event;
    State to;
    Act act;
  };
  /// The protocol, by state and event. A rank only ever goes on to a later state.
  static constexpr auto transitions() {
    using enum State;
    using enum Event;
    using enum Act;
    // clang-format off
    return std::to_array<Transition>({
        {healthy, error, failed, forward},
        {healthy, later_error, warned, note},
        {healthy, goodbye, healthy, note},
        {healthy, lost, failed, report},
        {healthy, late, failed, report},
        {healthy, own_error, failed, report},
        {healthy, abort, failed, say_goodbye},
        {healthy, call, healthy, nothing},
        {healthy, leave, left, say_goodbye},
        {warned, error, failed, forward},
        {warned, later_error, warned, note},
        {warned, goodbye, warned, note},
        {warned, lost, failed, forward},
        {warned, late, failed, report},
        {warned, own_error, failed, report},
        {warned, abort, failed, say_goodbye},
        {warned, call, failed, forward},
        {warned, leave, left, say_goodbye},
        {failed, error, failed, raise_first},
        {failed, later_error, failed, nothing},
        {failed, goodbye, failed, note},
        {failed, lost, failed, raise_first},
        {failed, late, failed, raise_first},
        {failed, own_error, failed, report},
        {failed, abort, failed, say_goodbye},
        {failed, call, failed, raise_first},
        {failed, leave, left, say_goodbye},
        {left, error, left, nothing},
        {left, later_error, left, nothing},
        {left, goodbye, left, nothing},
        {left, lost, left, nothing},
        {left, late, left, report},
        {left, own_error, left, report},
        {left, abort, left, nothing},
        {left, call, left, raise_first},
        {left, leave, left, nothing},
    });
    // clang-format on
  }
  static constexpr Transition transition(State from, Event event) {
    return transitions()[static_cast<size_t>(from) * kEvents + static_cast<size_t>(event)];
  }

  /// What ranks tell each other.
  struct Report {
    enum class Kind : uint8_t {
      error,       ///< `error` began in rank `origin`, in the sender's call number `call`; `text` says why
      goodbye,     ///< the sender leaves
      waiting,     ///< the sender waits long in its collective number `call`, and suspects `suspect`; a negative rank
                   ///< and no text: it waits no longer
      in_message,  ///< the sender waits long in the message `text`; empty: it waits no longer
    };
    Kind kind;
    ErrorKind error{};
    int origin = -1;
    uint64_t call = 0;
    Suspect suspect{};
    std::string_view text{};
  };

  /// How much of what the peers say poll() is to look for.
  enum class Look : uint8_t {
    reports,  ///< errors and goodbyes
    ends,     ///< the same, and peers that are gone, which takes system calls
    all,      ///< the same, and the calls in which peers wait
  };

  /// Carries the reports: the engine.
  class Carrier {
   public:
    /// Tells all peers; false if that must be tried again later. Errors and goodbyes need no memory, the first error
    /// counts, and no peer reads this rank's tensors any more when this returns.
    virtual bool send(const Report& report) noexcept = 0;
    /// The failure that was sent is kept now: ends the waits of this rank's other threads.
    virtual void stop() noexcept {}
    /// Calls on_report() and on_closed() for what has arrived.
    virtual void poll(Look look) = 0;

   protected:
    ~Carrier() = default;
  };

  /// `over_network`: a peer may be cut off while its process is there.
  Health(int rank, int world, CallLog& calls, Carrier& carrier, bool over_network)
      : rank_(rank),
        world_(world),
        over_network_(over_network),
        calls_(calls),
        carrier_(carrier),
        peers_(static_cast<size_t>(world)) {}
  Health(const Health&) = delete;
  Health& operator=(const Health&) = delete;

  int rank() const noexcept { return rank_; }
  int world() const noexcept { return world_; }
  CallLog& calls() noexcept { return calls_; }
  /// "rank 0 of 4".
  std::string self() const { return "rank " + std::to_string(rank_) + " of " + std::to_string(world_); }

  State state() const noexcept { return state_.load(std::memory_order_acquire); }
  bool failed() const noexcept { return failure_.failed(); }
  /// The kind of the first error.
  std::optional<ErrorKind> failure() const { return failure_.kind(); }
  bool has_left(int peer) const {
    const std::lock_guard lock(mutex_);
    return peers_[peer].left;
  }
  /// Throws the first error, if there is one.
  void raise_if_failed() const { failure_.raise_if_failed(); }

  // What the engine saw of a peer. These only note it; a wait, a call or a poll raises it.
  void on_report(int peer, const Report& report);
  /// The peer's process is gone, or the connection to it has ended because of `why`, and all that it sent is read.
  /// `memory_gone`: it ended because the memory of this call's tensor is not mapped any more.
  void on_closed(int peer, bool memory_gone, std::string why);
  /// Data of the peer's collective number `call` begin to arrive.
  void on_data(int peer, uint64_t call) { peers_[peer].call.store(call, std::memory_order_relaxed); }
  /// A message of that peer is complete: it does not wait for this rank any more.
  void on_message(int peer) {
    if (peers_[peer].waits.load(std::memory_order_relaxed)) [[unlikely]]
      forget_wait(peer);
  }

  /// Looks for reports. Before a call from time to time: one that waits for nobody, as a root's, hears of none.
  void look() { carrier_.poll(Look::reports); }
  /// Before a call: throws what ended the group, or what a peer has reported since the last call.
  void enter_call() {
    if (state() != State::healthy) [[unlikely]]
      enter_unwell();
  }
  /// The number of this collective. Only engines whose ranks may be in different calls need say it.
  void begin_call(uint64_t call);
  /// The wait, or the call, is over: takes back what this rank has said about it.
  void end_call();
  /// The call in progress has failed.
  void abandon_call() { in_call_.store(false, std::memory_order_relaxed); }

  /// Within a wait: throws if it cannot end well. `look`: ends, from time to time; reports otherwise.
  void examine(const Waiting& waiting, Look look, Clock::time_point now = Clock::now());
  /// Outside of any wait: throws the first error, or what a poll finds.
  void poll_failures();
  /// The same without a poll; `waiting`: within a wait, which may still end well.
  void raise_noted(const Waiting* waiting = nullptr);
  /// The rank that delays this one, which waits for `peer`: that peer, or the one that it waits for.
  Suspect straggler(int peer) const;

  /// Fails the group and tells the peers. Returns the text of the error that this rank raises. Needs no memory. Does
  /// nothing in a forked child.
  std::string poison(ErrorKind kind, const std::string& message) noexcept {
    return end(kind, message, {.kind = Report::Kind::error, .error = kind, .origin = rank_, .text = message});
  }
  void poison(const Error& error) noexcept {
    poison(error.kind(), in_words([&] { return std::string(error.what()); }));
  }
  /// The same for the exception in flight, unless the group has failed: an error of this library as it is; any other,
  /// such as bad_alloc, as one of `where`, because the peers may be half-way through the call. Returns what this
  /// rank raises.
  std::exception_ptr poison_in_flight(const std::function<std::string()>& where) noexcept;
  /// Checks for an interrupt of the program, which ends the call that `context` describes.
  template <typename Context>
  void check_interrupts(const Context& context) {
    ringlet::check_interrupts([&](const std::string& why) {
      poison(ErrorKind::peer_lost, in_words([&] { return context() + ": " + why; }));
    });
  }
  [[noreturn]] void fail(ErrorKind kind, const std::string& message) { rethrow(kind, poison(kind, message)); }
  /// The same for what a wait has found, unless another thread of this rank has failed meanwhile.
  [[noreturn]] void fail_in_wait(ErrorKind kind, const std::string& message) {
    fail_in_wait(kind, message, {.kind = Report::Kind::error, .error = kind, .origin = rank_, .text = message});
  }
  /// Ends all waits of this rank with an error. The peers hear that it leaves.
  void abort(const std::string& reason) noexcept;
  void leave() noexcept;

  /// Tells the peers in which message this rank has waited for a long time; "": in none.
  void say_message(const std::string& context) noexcept;

 private:
  /// What a peer reported of a failure, and the rank in which the failure began.
  struct Reported {
    ErrorKind kind;
    int origin;
    uint64_t call = 0;
    std::string text;
  };
  struct Closed {
    bool memory_gone;
    std::string why;
  };
  struct Peer {
    std::atomic<uint64_t> call{0};   // the last call of which this rank has seen something
    std::atomic<bool> waits{false};  // one of the three below is set
    // Guarded by mutex_.
    Suspect suspects{};                         // the rank that the peer waits for
    std::string in_collective{}, in_message{};  // the calls in which the peer has waited for a long time
    bool left = false;                          // the peer said goodbye, or reported an error
    std::optional<Closed> closed{};
  };

  bool concerns_now(const Reported& reported) const;
  void enter_unwell();
  void enter(State state) noexcept;
  void forget_wait(int peer);
  std::optional<int> peer_that_left(const Waiting& waiting) const;
  void report_straggler(const Waiting& waiting, Clock::time_point now);
  [[noreturn]] void time_out(const Waiting& waiting);
  std::string waiting_as_well(const Waiting& waiting) const;
  [[noreturn]] void fail_peer_lost(const Waiting* waiting, const std::string& why);
  [[noreturn]] void forward(const Waiting* waiting);
  std::string context(const Waiting* waiting) const { return waiting != nullptr ? waiting->context() : self(); }
  [[noreturn]] void fail_in_wait(ErrorKind kind, const std::string& message, const Report& report,
                                 bool reported = false);
  std::string end(ErrorKind kind, const std::string& message, const Report& report, bool reported = false) noexcept;

  const int rank_, world_;
  const bool over_network_;
  const int owner_ = this_process();
  CallLog& calls_;
  Carrier& carrier_;
  Failure failure_;
  std::recursive_mutex ending_;  // from before the peers are told of a failure until stop() has returned
  std::atomic<State> state_{State::healthy};
  mutable std::mutex mutex_;  // never held while the carrier acts
  std::vector<Peer> peers_;
  std::optional<Reported> reported_;  // the first; guarded by mutex_
  std::string said_message_;          // of the thread that moves messages
  std::atomic<bool> in_call_{false};
  std::atomic<uint64_t> call_{0};  // the call in progress, or the last one
  std::optional<Suspect> said_;    // the suspect that this rank last reported; of the thread that makes the call
};

}  // namespace ringlet
