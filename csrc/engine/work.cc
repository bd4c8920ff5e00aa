#include "engine/work.h"

#include <string>

#include "base/error.h"
#include "base/interrupts.h"

namespace ringlet {

bool Work::test() {
  if (!done() && owner_ == this_process()) help();
  return done();
}

void Work::raise_if_failed() const {
  if (!done()) return;
  if (foreign_) std::rethrow_exception(foreign_);
  if (out_of_memory_) throw std::bad_alloc();
  if (kind_) rethrow(*kind_, message_, reported_);
}

bool Work::await(const Deadline& deadline) {
  if (done()) return true;
  if (owner_ != this_process()) {
    throw InvalidUsage("this call was made by process " + std::to_string(owner_) + "; a forked child (here: process " +
                       std::to_string(this_process()) + ") cannot wait for it");
  }
  assist(deadline);
  if (done()) return true;
  std::unique_lock lock(mutex_);
  while (!done_ && !deadline.passed()) {
    changed_.wait_for(lock, std::min(deadline.left(), kInterruptCheckEvery));
    lock.unlock();
    check_interrupts();
    lock.lock();
  }
  return done_;
}

void Work::wait(std::chrono::milliseconds timeout) {
  if (!await(Deadline::after(timeout))) {
    throw Timeout("the call is not complete after " + std::to_string(timeout.count()) +
                  " ms of waiting, and goes on: wait for it again");
  }
  raise_if_failed();
}

std::string Work::describe() const {
  const std::string title = title_ ? title_() : "call";
  if (!done()) return title + ": pending for " + in_seconds(Deadline::Clock::now() - started_);
  try {
    raise_if_failed();
  } catch (const Error& error) {
    return title + ": failed: " + name(error.kind()) + ": " + error.what();
  } catch (const std::exception& error) {
    return title + ": failed: " + error.what();
  }
  return title + ": complete";
}

void Work::keep(const std::exception_ptr& error) noexcept {
  try {
    std::rethrow_exception(error);
  } catch (const Error& known) {
    kind_ = known.kind();
    reported_ = known.reported();
    message_ = in_words([&] { return std::string(known.what()); });
  } catch (const std::bad_alloc&) {
    out_of_memory_ = true;
  } catch (...) {
    foreign_ = error;  // an error of another library, which cannot be copied
  }
}

void Work::then(Callback callback) {
  if (!done()) expect_outside_waiter();
  attach(callbacks_, std::move(callback));
}

void Work::note_end(Callback callback) { attach(notes_, std::move(callback)); }

void Work::attach(std::vector<Callback>& list, Callback callback) {
  {
    const std::lock_guard lock(mutex_);
    if (!done_) {
      list.push_back(std::move(callback));
      return;
    }
  }
  std::exception_ptr error;
  try {
    raise_if_failed();
  } catch (...) {
    error = std::current_exception();
  }
  callback(error);
}

void Work::complete(const std::exception_ptr& error) {
  std::vector<Callback> notes, callbacks;
  {
    const std::lock_guard lock(mutex_);
    if (error) keep(error);
    done_.store(true, std::memory_order_release);
    notes = std::move(notes_);
    callbacks = std::move(callbacks_);
    changed_.notify_all();
  }
  settled();
  for (const Callback& note : notes) note(error);
  for (const Callback& callback : callbacks) callback(error);
}

}  // namespace ringlet
