// A rank's thread, which stays from one task to the next.
//
// Contract: begin() hands a task over, end() waits for it and returns what it threw, "" where nothing; or says that it
// is not done in time. Such a thread is left alone: what its tasks use must be kept for ever then.
// Thread safety: begin() and end() from one thread.
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "section.h"

namespace gpu_check {

class RankThread {
 public:
  RankThread() {
    std::thread([shared = shared_] { loop(*shared); }).detach();
  }
  ~RankThread() { give({}); }
  RankThread(const RankThread&) = delete;
  RankThread& operator=(const RankThread&) = delete;

  void begin(std::function<void()> act) {
    std::packaged_task<void()> task(std::move(act));
    done_ = task.get_future();
    give(std::move(task));
  }

  std::string end(std::chrono::seconds limit) {
    if (done_.wait_for(limit) != std::future_status::ready) {
      device_hangs = true;
      return "its thread has not come back after " + std::to_string(limit.count()) + " s, and is left alone";
    }
    try {
      done_.get();
    } catch (const std::exception& error) {
      return error.what();
    }
    return "";
  }

 private:
  struct Shared {
    std::mutex mutex;
    std::condition_variable changed;
    std::packaged_task<void()> task;  // one that is none ends the thread
    bool given = false;
  };

  void give(std::packaged_task<void()> task) {
    const std::lock_guard lock(shared_->mutex);
    shared_->task = std::move(task);
    shared_->given = true;
    shared_->changed.notify_one();
  }

  static void loop(Shared& shared) {
    for (;;) {
      std::packaged_task<void()> task;
      {
        std::unique_lock lock(shared.mutex);
        shared.changed.wait(lock, [&] { return shared.given; });
        shared.given = false;
        task = std::move(shared.task);
      }
      if (!task.valid()) return;
      task();
    }
  }

  const std::shared_ptr<Shared> shared_ = std::make_shared<Shared>();
  std::future<void> done_;
};

}  // namespace gpu_check
