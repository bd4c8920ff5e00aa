#include "comm/work.h"

#include <string>

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

bool Work::await(const Deadline& deadline) {
  if (!done()) assist(deadline);
  std::unique_lock lock(mutex_);
  while (!done_ && !deadline.passed()) {
    changed_.wait_for(lock, std::min(deadline.left(), std::chrono::milliseconds(60'000)));
  }
  return done_;
}

void Work::wait(std::chrono::milliseconds timeout) {
  if (!await(Deadline::after(timeout))) {
    throw Timeout("the call is not complete after " + std::to_string(timeout.count()) +
                  " ms of waiting; it goes on, wait for it again");
  }
  if (const std::exception_ptr failed = error()) std::rethrow_exception(failed);
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
