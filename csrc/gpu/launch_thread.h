// A thread that makes calls which may block, so that whoever needs them done keeps a deadline.
//
// Contract: run() gives a call to the thread and waits until it has returned, until the deadline passes, or until
// `poll`, asked every 20 ms, says to give up. A call that is given up goes on there; later ones are given up at once.
// The constructor throws ResourceError where there is no thread to be had.
// Ownership: the destructor waits a second for a call that was given up; after that the thread is left alone, so a
// call holds all that it uses. Thread safety: one caller of run() at a time; finish() also beside it.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <thread>

#include "base/deadline.h"

namespace ringlet {

class LaunchThread {
 public:
  /// `enter`: what the thread does first; may be empty.
  explicit LaunchThread(const std::function<void()>& enter);
  ~LaunchThread();
  LaunchThread(const LaunchThread&) = delete;
  LaunchThread& operator=(const LaunchThread&) = delete;

  /// What the call returned; nothing where it was given up. `poll` returns true to give up.
  std::optional<int> run(std::function<int()> call, const Deadline& deadline, const std::function<bool()>& poll);

  /// Makes the thread's last call, behind the one that it is in. Returns whether that was done after `most`: if not, it
  /// comes when the one before has returned. Later calls are given up at once.
  bool finish(std::function<void()> last, std::chrono::milliseconds most);

 private:
  struct Shared;
  const std::shared_ptr<Shared> shared_;
  std::thread thread_;
};

}  // namespace ringlet
