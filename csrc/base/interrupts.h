// The duties of a waiting thread to the runtime of its program (Python): it releases the runtime's lock, and notices
// signals.
//
// Contract: every loop that sleeps calls check_interrupts() between two sleeps of at most kInterruptCheckEvery. It then
// holds no lock of this library, because the runtime may run a signal handler that calls this library. If the runtime
// raises, the check throws an exception that is both the runtime's own and Interrupted. A wait that ends so in the
// middle of a call abandons the call and poisons its group. Without a runtime nothing is checked.
// Thread safety: all calls from any thread.
#pragma once

#include <chrono>
#include <exception>
#include <string>

namespace ringlet {

/// What the runtime does around a wait that gives the processor up: Python releases the GIL.
struct RuntimeHooks {
  void* (*leave)();
  void (*enter)(void*);
};
extern constinit thread_local const RuntimeHooks* runtime_hooks;  // constinit: read without a call that would make it

/// While it lives, this thread is outside of its runtime.
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

/// The part of an interrupt's exception that the core knows. It is not an Error, because it belongs to the program. It
/// is not a std::exception, because the derived class is one by its other base.
struct Interrupted {
  std::string by;  ///< the name of the exception, for people

 protected:
  explicit Interrupted(std::string name) : by(std::move(name)) {}
  Interrupted(const Interrupted&) = default;
  ~Interrupted() = default;
};

/// `check` lets the runtime act on signals in the calling thread; it throws a class derived from Interrupted.
void set_interrupt_check(void (*check)()) noexcept;

/// Asks the runtime, at most once every kInterruptCheckEvery in a thread.
void check_interrupts();

/// The same. Calls `give_up` with a text such as "interrupted (KeyboardInterrupt)" before the exception goes on.
template <typename GiveUp>
void check_interrupts(const GiveUp& give_up) {
  try {
    check_interrupts();
  } catch (const Interrupted& interrupted) {
    give_up("interrupted (" + interrupted.by + ")");
    throw;
  }
}

/// The same, for a wait that must still end well: returns the exception. Null: there is none.
inline std::exception_ptr caught_interrupt() {
  try {
    check_interrupts();
  } catch (const Interrupted&) {
    return std::current_exception();
  }
  return nullptr;
}

/// Whether this thread is in check_interrupts(): then it may be in a signal handler of the program.
bool checking_interrupts() noexcept;

/// While it lives, waits of this thread do not check for interrupts. The runtime handles a signal when the thread is
/// back.
class Uninterrupted {
 public:
  Uninterrupted() noexcept;
  ~Uninterrupted();
  Uninterrupted(const Uninterrupted&) = delete;
  Uninterrupted& operator=(const Uninterrupted&) = delete;
};

}  // namespace ringlet
