#include "comm/work.h"

#include <string>

#include "base/deadline.h"
#include "base/error.h"

namespace ringlet {

bool Work::done() const {
  const std::lock_guard lock(mutex_);
  return done_;
}

std::exception_ptr Work::error() const {
  const std::lock_guard lock(mutex_);
  return error_;
}

void Work::wait(std::chrono::milliseconds timeout) {
  const Deadline deadline = Deadline::after(timeout);
  std::unique_lock lock(mutex_);
  while (!done_) {
    if (deadline.passed()) {
      throw Timeout("the call is not complete after " + std::to_string(timeout.count()) +
                    " ms of waiting; it goes on, wait for it again");
    }
    changed_.wait_for(lock, std::min(deadline.left(), std::chrono::milliseconds(60'000)));
  }
  if (error_) std::rethrow_exception(error_);
}

void Work::then(Callback callback) {
  {
    const std::lock_guard lock(mutex_);
    if (!done_) {
      callback_ = std::move(callback);
      return;
    }
  }
  callback(error_);
}

void Work::complete(std::exception_ptr error) {
  Callback callback;
  {
    const std::lock_guard lock(mutex_);
    done_ = true;
    error_ = error;
    callback = std::move(callback_);
    changed_.notify_all();
  }
  if (callback) callback(error);
}

}  // namespace ringlet
