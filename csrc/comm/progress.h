// A thread that runs jobs in the order they were given. Thread safety: all calls from any thread; from its own only submit
// and pending, when the completion of one job asks for another.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "comm/work.h"

namespace ringlet {

class ProgressThread {
 public:
  ProgressThread() : thread_([this] { loop(); }) {}
  ~ProgressThread();

  /// Runs `job` after all earlier ones. `keep` is let go when it has run. Given from the thread itself it runs at once,
  /// ahead of the waiting ones: what completes a job may wait for what it submits, which could never start otherwise.
  std::shared_ptr<Work> submit(std::function<void()> job, std::shared_ptr<void> keep);

  /// The same in two steps, on the thread itself: the job counts as pending from the first on.
  bool is_this_thread() const { return std::this_thread::get_id() == thread_.get_id(); }
  void reserve() { pending_.fetch_add(1, std::memory_order_acq_rel); }
  std::shared_ptr<Work> run_reserved(std::function<void()> job, std::shared_ptr<void> keep);

  /// Whether jobs are waiting or running.
  bool pending() const { return pending_.load(std::memory_order_acquire) != 0; }
  bool wait_idle(std::chrono::milliseconds timeout);

 private:
  struct Job {
    std::function<void()> run;
    std::shared_ptr<Work> work;
    std::shared_ptr<void> keep;
  };
  void loop();
  void run(Job job);

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Job> jobs_;  // guarded by mutex_
  bool stop_ = false;     // guarded by mutex_
  std::atomic<int> pending_{0};
  std::thread thread_;  // last: starts when all else is there
};

}  // namespace ringlet
