// What a waiting thread owes the runtime of its program (Python): to let go of the runtime's lock, and to notice
// signals.
//
// Contract: every loop that sleeps calls check_interrupts() between two sleeps of at most kInterruptCheckEvery, with no
// lock of this library held: the runtime may run a signal handler, and that may call this library. Where the runtime
// raises, the check throws what is both the runtime's own exception and Interrupted; a wait that ends so in the middle
// of a call gives the call up, and poisons its group. Without a runtime nothing is checked.
// Thread safety: all calls from any thread.
#pragma once

#include <chrono>
#include <string>

namespace ringlet {

/// What the caller's runtime wants done around a wait that gives the processor up: Python lets go of the GIL.
struct RuntimeHooks {
  void* (*leave)();
  void (*enter)(void*);
};
extern thread_local const RuntimeHooks* runtime_hooks;

/// Outside the caller's runtime for as long as it lives.
class OutsideRuntime {
 public:
  OutsideRuntime() : hooks_(runtime_hooks), state_(hooks_ != nullptr ? hooks_->leave() : nullptr) {
    runtime_hooks = nullptr;
  }
  ~OutsideRuntime() {
    if (hooks_ != nullptr) hooks_->enter(state_);
    runtime_hooks = hooks_;
  }
  OutsideRuntime(const OutsideRuntime&) = delete;
  OutsideRuntime& operator=(const OutsideRuntime&) = delete;

 private:
  const RuntimeHooks* hooks_;
  void* state_;
};

inline constexpr std::chrono::milliseconds kInterruptCheckEvery{50};

/// The part of an interrupt's exception that the core knows. Not an Error: it is the program's own. No std::exception
/// either, since what derives from it is one by its other base.
struct Interrupted {
  std::string by;  ///< the name of the exception, for people

 protected:
  explicit Interrupted(std::string name) : by(std::move(name)) {}
  Interrupted(const Interrupted&) = default;
  ~Interrupted() = default;
};

/// `check` lets the runtime act on signals in the calling thread; it throws a class derived from Interrupted.
void set_interrupt_check(void (*check)()) noexcept;

/// Asks the runtime, if this thread has not asked for kInterruptCheckEvery.
void check_interrupts();

/// The same; tells `give_up`, by a text such as "interrupted (KeyboardInterrupt)", before the exception goes on.
template <typename GiveUp>
void check_interrupts(const GiveUp& give_up) {
  try {
    check_interrupts();
  } catch (const Interrupted& interrupted) {
    give_up("interrupted (" + interrupted.by + ")");
    throw;
  }
}

/// Whether this thread is in check_interrupts(), and so in a signal handler of the program.
bool checking_interrupts() noexcept;

/// While it lives this thread's waits check nothing: a signal is handled once the thread is back in the runtime.
class Uninterrupted {
 public:
  Uninterrupted() noexcept;
  ~Uninterrupted();
  Uninterrupted(const Uninterrupted&) = delete;
  Uninterrupted& operator=(const Uninterrupted&) = delete;
};

}  // namespace ringlet
