// The handle of an asynchronous call.
//
// Contract: completes once, with or without an error; may be dropped unwaited. Thread safety: all calls from any
// thread.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "base/process.h"

namespace ringlet {

class Work {
 public:
  virtual ~Work() = default;

  /// Called once, after completion, in the thread that completed it (or at once, if it is complete); several in the
  /// order in which they were given.
  using Callback = std::function<void(const std::exception_ptr&)>;

  bool done() const;
  /// The same, after this thread has done what it can towards completion without a wait.
  bool test();
  /// Throws the error that it ended with, if it has: what is thrown is the caller's alone, and is never a part of what
  /// another thread holds.
  void raise_if_failed() const;
  /// Whether it is complete, at the latest by `deadline`. Throws InvalidUsage only, in a forked child, where a pending
  /// call is its parent's; and an interrupt (base/runtime.h), after which the call itself goes on.
  bool await(const Deadline& deadline);
  /// Returns when complete, throwing its error. Throws Timeout after `timeout`; the call itself goes on.
  void wait(std::chrono::milliseconds timeout);
  void then(Callback callback);
  /// The same, ahead of those, for what neither waits nor calls this library nor runs code of its user's: it may run in
  /// any call that the user makes.
  void note_end(Callback callback);
  /// Somebody may wait for it by other means than await(), or run code of the user's when it is complete.
  virtual void expose() { exposed_.store(true, std::memory_order_release); }
  bool exposed() const { return exposed_.load(std::memory_order_acquire); }

  void complete(const std::exception_ptr& error);

  /// What it is a handle of, for people. Given by whoever made it, before others see it.
  void set_title(std::function<std::string()> title) { title_ = std::move(title); }
  /// "all_reduce #3 (ring, sum, float32, 8 elements): pending for 0.2 s".
  std::string describe() const;

 protected:
  /// What the waiting thread can do towards completion; it may return early.
  virtual void assist(const Deadline& deadline) { static_cast<void>(deadline); }
  /// The same for a thread that only asks: returns without a wait.
  virtual void help() {}
  /// It is complete, and what is attached to it has not run yet.
  virtual void settled() {}

 private:
  void attach(std::vector<Callback>& list, Callback callback);

  const int owner_ = this_process();
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  const Deadline::Clock::time_point started_ = Deadline::Clock::now();
  std::function<std::string()> title_;
  bool done_ = false;            // guarded by mutex_, like the rest
  std::function<void()> raise_;  // throws the error; empty without one
  std::vector<Callback> notes_, callbacks_;
  std::atomic<bool> exposed_{false};
};

}  // namespace ringlet
