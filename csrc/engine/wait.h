// Waiting for a peer: spin, yield, sleep; and every way in which a wait can end badly.
//
// A wait ends with the thing waited for, or with an error that names who, what and how far: Timeout at the deadline,
// PeerLost when the peer's process is gone or it left the group, the error another rank reported, InvalidUsage when the peer is in
// another call. The first error poisons the group: it is published to the peers and raised again by later calls.
// Ownership: none. Thread safety: one thread at a time per Waiter; failure() from any.
#pragma once

#include <chrono>
#include <functional>
#include <mutex>
#include <optional>
#include <string>

#include "base/deadline.h"
#include "transport/transport.h"

namespace ringlet {

struct Waiting {
  int peer;
  std::chrono::milliseconds timeout;
  std::function<bool()> reached;
  std::function<void(int64_t)> sleep;         ///< at most that many nanoseconds, until something may have changed
  std::function<void()> check;                ///< throws if the peer turns out to be in another call; may be empty
  std::function<std::string()> story;         ///< "rank 0 of 4 in all_reduce #3 (...), round 1, ..."
};

class Waiter {
 public:
  explicit Waiter(Transport& transport) : transport_(transport) {}

  /// Returns when waiting.reached(); throws otherwise. `patient` threads give their processor up soon.
  void wait(const Waiting& waiting, bool patient);

  /// Publishes the error, remembers it for later calls, and throws it.
  [[noreturn]] void fail(ErrorKind kind, const std::string& message);

  /// Throws the error that poisoned the group, if one did.
  void raise_if_failed() {
    if (failed_.load(std::memory_order_acquire)) raise();
  }

  /// Ends all waits of this rank with an error, from any thread.
  void abort(const std::string& reason);

 private:
  [[noreturn]] void raise();
  void examine(const Waiting& waiting, const Deadline& deadline, bool look_at_process);

  Transport& transport_;
  std::atomic<bool> failed_{false};
  std::atomic<bool> aborted_{false};
  std::mutex mutex_;
  std::optional<std::pair<ErrorKind, std::string>> failure_;  // guarded by mutex_
  std::string abort_reason_;                                  // guarded by mutex_
};

}  // namespace ringlet
