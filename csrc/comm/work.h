// The handle of an asynchronous call.
//
// Contract: completes once, with or without an error; may be dropped unwaited. Thread safety: all calls from any
// thread.
#pragma once

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
  using Callback = std::function<void(std::exception_ptr)>;

  bool done() const;
  /// Throws the error that it ended with, if it has: what is thrown is the caller's alone, and is never a part of what
  /// another thread holds.
  void raise_if_failed() const;
  /// Whether it is complete, at the latest by `deadline`. Throws InvalidUsage only, in a forked child, where a pending
  /// call is its parent's; and an interrupt (base/runtime.h), after which the call itself goes on.
  bool await(const Deadline& deadline);
  /// Returns when complete, throwing its error. Throws Timeout after `timeout`; the call itself goes on.
  void wait(std::chrono::milliseconds timeout);
  void then(Callback callback);

  void complete(std::exception_ptr error);

  /// What it is a handle of, for people. Given by whoever made it, before others see it.
  void set_title(std::function<std::string()> title) { title_ = std::move(title); }
  /// "all_reduce #3 (ring, sum, float32, 8 elements): pending for 0.2 s".
  std::string describe() const;

 protected:
  /// What the waiting thread can do towards completion; it may return early.
  virtual void assist(const Deadline& deadline) { static_cast<void>(deadline); }

 private:
  const int owner_ = this_process();
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  const Deadline::Clock::time_point started_ = Deadline::Clock::now();
  std::function<std::string()> title_;
  bool done_ = false;            // guarded by mutex_, like the rest
  std::function<void()> raise_;  // throws the error; empty without one
  std::vector<Callback> callbacks_;
};

}  // namespace ringlet
