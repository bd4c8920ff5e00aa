#include "comm/progress.h"

#include <pthread.h>

#include "base/thread.h"

namespace ringlet {

void ProgressThread::end() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
    changed_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
}

void ProgressThread::make_ready() {
  const std::lock_guard lock(mutex_);
  if (!thread_.joinable()) thread_ = start_thread("asynchronous calls", [this] { loop(); });
}

std::shared_ptr<Work> ProgressThread::submit(std::function<void()> job, std::shared_ptr<void> keep) {
  if (is_this_thread()) {
    reserve();
    return run_reserved(std::move(job), std::move(keep));
  }
  auto work = std::make_shared<Queued>(*this);
  const std::lock_guard lock(mutex_);
  jobs_.push_back({std::move(job), work, std::move(keep)});
  pending_.fetch_add(1, std::memory_order_acq_rel);
  changed_.notify_all();
  return work;
}

std::shared_ptr<Work> ProgressThread::run_reserved(std::function<void()> job, std::shared_ptr<void> keep) {
  auto work = std::make_shared<Work>();
  run({std::move(job), work, std::move(keep)});
  return work;
}

bool ProgressThread::wait_idle(std::chrono::milliseconds timeout) {
  std::unique_lock lock(mutex_);
  return changed_.wait_for(lock, timeout, [&] { return !pending(); });
}

void ProgressThread::loop() {
  ::pthread_setname_np(::pthread_self(), "ringlet");
  id_.store(std::this_thread::get_id(), std::memory_order_relaxed);
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return stop_ || !jobs_.empty(); });
    if (jobs_.empty()) return;
    run_next(lock);
  }
}

void ProgressThread::run_next(std::unique_lock<std::mutex>& lock) {
  Job job = std::move(jobs_.front());
  jobs_.pop_front();
  lock.unlock();
  run(std::move(job));
  lock.lock();
  changed_.notify_all();
}

void ProgressThread::run_until(const Work& work) {
  std::unique_lock lock(mutex_);
  while (!work.done() && !jobs_.empty()) run_next(lock);
}

void ProgressThread::run(Job job) {
  std::exception_ptr error;
  try {
    job.run();
  } catch (...) {
    error = std::current_exception();
  }
  // Before anyone can see it complete: what was kept is the caller's again, and a synchronous call that follows a
  // wait() runs in its own thread.
  job.keep.reset();
  pending_.fetch_sub(1, std::memory_order_acq_rel);
  job.work->complete(error);
}

}  // namespace ringlet
