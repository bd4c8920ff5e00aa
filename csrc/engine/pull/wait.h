// Waiting for a peer: spin, yield, sleep; and every way in which a wait can end badly.
//
// A wait ends when its condition is true, or with an error that names the rank, the call and its progress: Timeout at
// the deadline, PeerLost when the peer's process is gone or it left the group, the error that another rank reported,
// InvalidUsage when the peer is in another call. The first error poisons the group: this rank publishes it to its peers
// and raises it in later calls. An interrupt of the program (base/interrupts.h) ends a wait, and poisons the group,
// too. Ownership: none. Thread safety: one thread at a time per Waiter; failure() and poll_failures() from any.
#pragma once

#include <sched.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "base/deadline.h"
#include "base/interrupts.h"
#include "engine/call_log.h"
#include "engine/failure.h"
#include "transport/transport.h"

namespace ringlet {

struct Waiting {
  int peer;  ///< negative: any
  std::chrono::milliseconds timeout;
  std::function<bool()> reached;
  std::function<void()> check;           ///< throws if the peer turns out to be in another call; may be empty
  std::function<std::string()> behind;   ///< "; furthest behind is rank 3, which ..."; may be empty
  bool message = false;                  ///< of a message; else of a collective
  bool receiving = false;                ///< of a message that is received
  std::function<std::string()> context;  ///< "rank 0 of 4 in all_reduce #3 (...), round 1, ..."
};

class Waiter {
 public:
  /// `calls`: the group's.
  Waiter(Transport& transport, CallLog& calls) : transport_(transport), calls_(calls) {}

  CallLog& calls() { return calls_; }

  /// Spins a while on a counter that only grows. Returns whether the counter has reached `target`. `background` threads
  /// spin little, because they must not take the processor from the rank's own computation.
  template <typename T>
  bool spin(const std::atomic<T>& word, T target, bool background) const {
    const int most = spins(background);
    for (int i = 0; i < most; ++i) {
      if (word.load(std::memory_order_acquire) >= target) return true;
      if (i > kBusySpins) relax();
    }
    return false;
  }

  int spins(bool background) const { return background || transport_.oversubscribed() ? kSpinsWhenShared : kSpins; }

  /// The pause between two looks at a counter.
  static void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }

  /// Checks for an interrupt between two waits of a call. An interrupt abandons the call, which `context` describes.
  template <typename Context>
  void check_for_interrupt(const Context& context) {
    check_interrupts([&](const std::string& why) { poison(ErrorKind::peer_lost, context() + ": " + why); });
  }

  /// Yields, then sleeps, until waiting.reached(); throws if the wait ends otherwise. Background threads sleep at once,
  /// because the scheduler runs a woken thread immediately, but a yielding thread only after the others' time slices.
  /// `target`: the value that the peer's counter must reach.
  void wait(const Waiting& waiting, uint64_t target, bool background);

  /// A wait under way: its deadline, and what this rank has checked and reported.
  struct Ongoing {
    explicit Ongoing(std::chrono::milliseconds timeout) : deadline(Deadline::after(timeout)) {}
    Deadline deadline;
    Deadline::Clock::time_point looked = Deadline::Clock::now();  ///< last check of the peers' processes
    bool told = false;                                            ///< the peers were told in which call this rank waits
  };
  /// Checks a wait that goes on. Throws if it cannot end well.
  void look(const Waiting& waiting, Ongoing& ongoing);
  /// The wait is over.
  void end(const Ongoing& ongoing) noexcept {
    if (ongoing.told) transport_.control().in_collective.set("");
  }

  /// Yields for a while. Returns whether `reached()` became true.
  template <typename Reached>
  static bool yield_until(const Reached& reached) {
    // On a busy machine one yield takes other processes' time slices, so the yields are bounded in time as well.
    const auto last = Deadline::Clock::now() + kProcessCheckEvery;
    for (int i = 0; i < kYields && Deadline::Clock::now() < last; ++i) {
      if (reached()) return true;
      ::sched_yield();
    }
    return false;
  }

  /// Sleeps until the peer's counter is at `target`, at most `nanoseconds`. Several threads may sleep at once.
  void sleep_on_peer(int peer, uint64_t target, int64_t nanoseconds) noexcept;
  /// Whether a peer sleeps until this rank makes progress.
  bool is_awaited() const noexcept;

  /// Throws if the wait cannot end well, or its deadline has passed.
  void examine(const Waiting& waiting, const Deadline& deadline, bool look_at_process);

  /// Publishes the error and remembers it for later calls. Returns its text, as this rank raises it. Needs no memory.
  std::string poison(ErrorKind kind, const std::string& message) noexcept;
  /// The same, and throws it.
  [[noreturn]] void fail(ErrorKind kind, const std::string& message);

  /// Throws the error that poisoned the group, if one did.
  void raise_if_failed() const { failure_.raise_if_failed(); }

  /// Outside of any wait: throws if a peer has reported an error, or its process is gone.
  void poll_failures();

  bool failed() const { return failure_.failed(); }

  /// The kind of the error that poisoned the group.
  std::optional<ErrorKind> failure() const { return failure_.kind(); }

  /// Tells the peers that this rank makes no more calls, and ends all its waits with an error. From any thread, also
  /// beside depart().
  void abort(const std::string& reason);

  /// Tells the peers in which message this rank has waited for a long time; "": in none.
  void tell_message(const std::string& context) noexcept { transport_.control().in_message.set(context); }

  /// The same, after all waits have ended: from now on this object reads no region, whatever is called (transport.h).
  void depart() noexcept;

 private:
  static constexpr int kYields = 2000;
  static constexpr auto kProcessCheckEvery = std::chrono::milliseconds(20);
  static constexpr int kSpins = 3000;          // about 100 us: longer than any round between running ranks takes
  static constexpr int kBusySpins = 200;       // without the processor's pause, which alone takes 40 ns or more
  static constexpr int kSpinsWhenShared = 20;  // ranks outnumber processors: the awaited rank may need this processor

  void leave() noexcept;
  bool has_left(int q) const;
  bool is_gone(int q) const;
  int rank_that_failed() const;
  std::string waiting_as_well(const Waiting& waiting) const;
  std::pair<ErrorKind, std::string> reported(int failed, const std::string& context) const;
  std::optional<std::pair<ErrorKind, std::string>> trouble() const;

  Transport& transport_;
  CallLog& calls_;
  std::atomic<int> sleepers_{0};  // threads of this rank on some peer's counter
  std::atomic<bool> aborted_{false};
  mutable std::mutex mutex_;
  Failure failure_;
  std::string abort_reason_;  // guarded by mutex_
  bool departed_ = false;     // guarded by mutex_
  int leaving_ = 0;           // threads that still read regions in leave(); guarded by mutex_
  std::condition_variable left_;
};

}  // namespace ringlet
