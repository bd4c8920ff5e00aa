// Waiting for a peer's counter: spin, yield, sleep. And the carrier of reports between ranks that share memory: control
// pages.
//
// A wait ends when its condition is true, or as the group's health decides (engine/health.h). An interrupt of the program
// (base/interrupts.h) ends a wait, and poisons the group. Ownership: transport and health outlive it. Thread safety:
// spin, wait and look from the thread that makes the call; all else from any thread.
#pragma once

#include <sched.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>

#include "base/deadline.h"
#include "base/interrupts.h"
#include "engine/health.h"
#include "transport/transport.h"

namespace ringlet {

class Waiter final : public Health::Carrier {
 public:
  Waiter(Transport& transport, Health& health) : transport_(transport), health_(health) {}

  Health& health() { return health_; }

  /// Spins a while on a counter that only grows. Returns whether the counter has reached `target`. `background` threads
  /// spin little, because they must not take the processor from the rank's own computation.
  bool spin(const std::atomic<uint64_t>& word, uint64_t target, bool background) const {
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

  /// Yields, then sleeps, until waiting.reached(); throws if the wait ends otherwise. Background threads sleep at once,
  /// because the scheduler runs a woken thread immediately, but a yielding thread only after the others' time slices.
  /// `target`: the value that the peer's counter must reach.
  void wait(const Waiting& waiting, uint64_t target, bool background);

  /// Checks a wait that goes on. Throws if it cannot end well. `looked`: when it last looked for ended processes.
  void look(const Waiting& waiting, Deadline::Clock::time_point& looked);

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

  /// Sleeps a moment, at most until the peer's counter is at `target`. Several threads may sleep at once.
  void sleep_on_peer(int peer, uint64_t target, std::chrono::nanoseconds most) noexcept;
  /// Whether a peer sleeps until this rank makes progress.
  bool is_awaited() const noexcept;

  // Health::Carrier
  bool send(const Health::Report& report) noexcept override;
  void poll(Health::Look look) override;

  /// After leave(), and after all waits have ended: from now on this object reads no region, whatever is called
  /// (transport.h).
  void depart() noexcept;

 private:
  static constexpr int kYields = 2000;                                       ///< yields before a wait sleeps
  static constexpr auto kProcessCheckEvery = std::chrono::milliseconds(20);  ///< how often a waiting rank asks whether
                                                                             ///< its peers' processes are there
  static constexpr int kSpins = 3000;     ///< looks before a wait yields: about 100 us, longer than any round between
                                          ///< running ranks takes
  static constexpr int kBusySpins = 200;  // without the processor's pause, which alone takes 40 ns or more
  static constexpr int kSpinsWhenShared = 20;  ///< the same if ranks outnumber processors, because the awaited rank may
                                               ///< need this one, and on progress threads

  Transport& transport_;
  Health& health_;
  std::atomic<int> sleepers_{0};  // threads of this rank on some peer's counter
  std::mutex mutex_;
  bool departed_ = false;  // guarded by mutex_
  int sending_ = 0;        // threads that still read regions in send(); guarded by mutex_
  std::condition_variable sent_;
};

}  // namespace ringlet
