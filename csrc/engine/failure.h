// The first error of a group, which every later call raises. Thread safety: all calls from any thread.
#pragma once

#include <atomic>
#include <mutex>
#include <optional>
#include <string>

#include "base/error.h"

namespace ringlet {

class Failure {
 public:
  bool failed() const { return failed_.load(std::memory_order_acquire); }

  std::optional<ErrorKind> kind() const {
    const std::lock_guard lock(mutex_);
    return what_ ? std::optional(what_->kind) : std::nullopt;
  }

  /// Keeps an error. Returns false if there was one before. Without memory for the message it keeps kOutOfMemory.
  /// `reported`: Error::reported.
  bool set(ErrorKind kind, const std::string& message, bool reported = false) noexcept {
    const std::lock_guard lock(mutex_);
    if (what_) return false;
    what_.emplace(What{kind, in_words([&] { return message; }), reported});
    failed_.store(true, std::memory_order_release);
    return true;
  }

  /// `before` precedes the message.
  [[noreturn]] void raise(const std::string& before) const {
    const std::lock_guard lock(mutex_);
    rethrow(what_->kind, before + what_->message, what_->reported);
  }
  void raise_if_failed() const {
    if (failed()) raise("this group failed before: ");
  }

 private:
  struct What {
    ErrorKind kind;
    std::string message;
    bool reported;
  };

  std::atomic<bool> failed_{false};
  mutable std::mutex mutex_;
  std::optional<What> what_;  // guarded by mutex_
};

}  // namespace ringlet
