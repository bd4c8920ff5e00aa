// A thread that runs jobs in the order they were given. What runs there when a job is complete may give more of them
// and may wait for any. Thread safety: all calls from any thread; from its own all but wait_idle.
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
  ProgressThread() = default;
  ~ProgressThread() { end(); }
  /// Returns when what was given has run. Nothing may be given any more.
  void end();

  /// Starts the thread if it does not run yet. Throws SystemError. submit() comes after it.
  void make_ready();
  /// Runs `job` after all earlier ones. `keep` is let go when it has run. Given from the thread itself it runs at once,
  /// ahead of the waiting ones: what completes a job may wait for what it submits, which could never start otherwise.
  std::shared_ptr<Work> submit(std::function<void()> job, std::shared_ptr<void> keep);

  /// The same in two steps, on the thread itself: the job counts as pending from the first on.
  bool is_this_thread() const { return std::this_thread::get_id() == id_.load(std::memory_order_relaxed); }
  void reserve() { pending_.fetch_add(1, std::memory_order_acq_rel); }
  std::shared_ptr<Work> run_reserved(std::function<void()> job, std::shared_ptr<void> keep);

  /// Whether jobs are waiting or running.
  bool pending() const { return pending_.load(std::memory_order_acquire) != 0; }
  bool wait_idle(std::chrono::milliseconds timeout);

 private:
  /// On the thread itself a wait runs the jobs that are in the way: nobody else would.
  class Queued final : public Work {
   public:
    explicit Queued(ProgressThread& thread) : thread_(thread) {}

   protected:
    void assist(const Deadline&) override {  // the thread is there as long as one of its jobs is incomplete
      if (thread_.is_this_thread()) thread_.run_until(*this);
    }

   private:
    ProgressThread& thread_;
  };
  struct Job {
    std::function<void()> run;
    std::shared_ptr<Work> work;
    std::shared_ptr<void> keep;
  };
  void loop();
  void run(Job job);
  void run_next(std::unique_lock<std::mutex>& lock);
  void run_until(const Work& work);

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Job> jobs_;  // guarded by mutex_
  bool stop_ = false;     // guarded by mutex_
  std::atomic<int> pending_{0};
  std::atomic<std::thread::id> id_{};  // set by the thread itself
  std::thread thread_;                 // made when first needed; guarded by mutex_
};

}  // namespace ringlet
