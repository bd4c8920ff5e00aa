// The number of this process, at the cost of one load. Objects keep it to notice that they are in a forked child, which
// has its parent's objects but none of its threads. Thread safety: all calls from any thread.
#pragma once

#include <pthread.h>

#include <atomic>
#include <memory>

namespace ringlet {

extern std::atomic<int> process_number;  // a handler in the child of every fork() updates it

inline int this_process() noexcept { return process_number.load(std::memory_order_relaxed); }

/// What threads of this process share: made at first use, and never destroyed, because threads may use it until the
/// process ends. A forked child makes its own: at the fork a thread of the parent may have held a lock of it, or been
/// half through a change, or half through making it, for which the child would wait if it were a static variable.
template <typename T>
class OfProcess {
 public:
  T& get() {
    Owned* known = owned_.load(std::memory_order_acquire);
    if (known != nullptr && known->owner == this_process()) return known->state;
    auto made = std::make_unique<Owned>();
    if (!owned_.compare_exchange_strong(known, made.get())) return known->state;  // another thread was faster
    return made.release()->state;
  }

 private:
  struct Owned {
    const int owner = this_process();
    T state{};
  };
  std::atomic<Owned*> owned_{nullptr};
};

/// Makes the State that a process and its forked children go on using: no thread holds its `mutex` at a fork, and the
/// child calls in_child() before it releases the mutex. One for each type; never destroyed, because threads may use it
/// until the process ends. Make it when the library is loaded: a child that is forked while the first thread makes it
/// would wait for that thread.
template <typename State>
State& kept_at_fork() {
  static State* state = nullptr;
  state = new State;
  ::pthread_atfork([] { state->mutex.lock(); }, [] { state->mutex.unlock(); },
                   [] {
                     state->in_child();
                     state->mutex.unlock();
                   });
  return *state;
}

}  // namespace ringlet
