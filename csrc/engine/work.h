// The handle of an asynchronous call.
//
// Contract: it completes once, with or without an error. The caller may drop it and not wait. Thread safety: all calls
// from any thread.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "base/error.h"
#include "base/process.h"

namespace ringlet {

class Work {
 public:
  virtual ~Work() = default;

  /// Adds a callback. It runs once, after completion, in the completing thread; at once if the call is complete.
  /// Several callbacks run in the order in which they were added.
  using Callback = std::function<void(const std::exception_ptr&)>;

  bool done() const { return done_.load(std::memory_order_acquire); }
  /// The same, after this thread has carried the call on as far as it can without a wait.
  bool test();
  /// Throws the error of the call, if it failed. The exception is a new object, which no other thread holds.
  void raise_if_failed() const;
  /// Waits until `deadline` and returns whether the call is complete. Throws InvalidUsage in a forked child, if the
  /// pending call is its parent's; and an interrupt (base/interrupts.h), after which the call itself goes on.
  bool await(const Deadline& deadline);
  /// Returns when complete, throwing its error. Throws Timeout after `timeout`; the call itself goes on.
  void wait(std::chrono::milliseconds timeout);
  void then(Callback callback);
  /// The same, before those callbacks, for code that does not wait, does not call this library and runs no user code:
  /// it may run in any call of the user.
  void note_end(Callback callback);
  /// Notes that a thread may wait for it by other means than await(), or that user code runs on completion.
  virtual void expect_outside_waiter() { exposed_.store(true, std::memory_order_release); }
  bool exposed() const { return exposed_.load(std::memory_order_acquire); }

  /// Needs no memory itself, so that no waiter is forgotten.
  void complete(const std::exception_ptr& error);

  /// The call, in words. Its maker sets the title before other threads see the work.
  void set_title(std::function<std::string()> title) { title_ = std::move(title); }
  /// "all_reduce #3 (ring, sum, float32, 8 elements): pending for 0.2 s".
  std::string describe() const;

 protected:
  /// Lets the waiting thread carry the call on; it may return early.
  virtual void assist(const Deadline& deadline) { static_cast<void>(deadline); }
  /// The same for test(): returns without a wait.
  virtual void help() {}
  /// The call is complete, and its callbacks have not run yet.
  virtual void settled() {}

 private:
  void attach(std::vector<Callback>& list, Callback callback);
  void keep(const std::exception_ptr& error) noexcept;

  const int owner_ = this_process();
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  const Deadline::Clock::time_point started_ = Deadline::Clock::now();
  std::function<std::string()> title_;
  std::atomic<bool> done_{false};  // written under mutex_
  // The error, which does not change once done_ is true. Each waiter throws a new object, unless it is foreign.
  std::optional<ErrorKind> kind_;
  std::string message_;
  bool reported_ = false;  // Error::reported
  bool out_of_memory_ = false;
  std::exception_ptr foreign_;
  std::vector<Callback> notes_, callbacks_;  // guarded by mutex_
  std::atomic<bool> exposed_{false};
};

}  // namespace ringlet
