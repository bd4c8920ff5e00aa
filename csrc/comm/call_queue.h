// The asynchronous calls of a group, in the order in which they were given.
//
// Contract: the threads that use the queue carry its calls on (decision 0044). The thread that gives a call carries it
// on as far as it goes without a wait, and so does every thread that gives a later call or tests one. A thread that
// waits for a call carries it on to its end. The queue's own thread takes a call over at once if a thread may wait for
// it by other means, or if the call is large and the thread takes no processor from the rank's computation. Otherwise
// it leaves the call to the threads that come: for 200 us; for 5 ms if it would take that processor, and no peer sleeps
// until this rank goes on. One thread at a time holds the *turn*. Only this thread carries calls on and runs callbacks;
// a thread that gives or tests a call leaves callbacks to others (Work::exposed). A callback may give calls, which run
// at once, before the calls in the queue, and it may wait for any call. A thread that sleeps until a peer is ready does
// not hold the turn.
// Ownership: the engine outlives the queue. Thread safety: all calls from any thread.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "engine/engine.h"
#include "engine/work.h"

namespace ringlet {

class CallQueue : public std::enable_shared_from_this<CallQueue> {
 public:
  struct Job {
    Call call;
    std::vector<Call> later{};      ///< calls that follow it and belong to the same job
    std::function<void()> whole{};  ///< instead of the call: a function that the queue's own thread runs to its end,
                                    ///< or a callback that waits for it
    std::function<std::string()> title{};  ///< Work::set_title
    std::shared_ptr<void> keep{};          ///< released when the job has run
    bool large = false;                    ///< worth another thread, if a processor is free
  };
  explicit CallQueue(Engine& engine);
  ~CallQueue() { end(); }
  /// Returns when all jobs have run and no thread waits here. No job may be given afterwards.
  void end();

  /// Starts the thread if it does not run yet. Throws ResourceError. submit() comes after it.
  void make_ready();
  /// Puts a job behind all earlier ones. If this throws, the job is not there.
  std::shared_ptr<Work> submit(Job job);
  /// Carries calls on as far as they go without a wait, if no other thread does. `given`: the last call is new, and a
  /// thread with a processor of its own may take it.
  void progress(bool given = false);

  /// Whether the caller runs the callbacks of a complete call, and no later call has begun.
  bool may_run_ahead() const { return has_turn() && !begun_; }
  /// A job ahead of those in the queue, in two steps: it counts as pending from the first on.
  std::shared_ptr<Work> reserve(std::function<std::string()> title);
  void run_reserved(Work& work, const std::function<void()>& job, std::shared_ptr<void> keep);

  bool has_turn() const { return owner_.load(std::memory_order_relaxed) == std::this_thread::get_id(); }
  /// Whether jobs are waiting or under way.
  bool pending() const { return pending_.load(std::memory_order_acquire) != 0; }
  bool wait_idle(std::chrono::milliseconds timeout);

 private:
  using Clock = std::chrono::steady_clock;

  class Queued final : public Work {
   public:
    explicit Queued(std::weak_ptr<CallQueue> queue) : queue_(std::move(queue)) {}

   protected:
    void assist(const Deadline& deadline) override {
      if (const auto queue = queue_.lock()) queue->await(*this, deadline);
    }
    void help() override {
      if (const auto queue = queue_.lock()) queue->progress();
    }
    void expect_outside_waiter() override {
      Work::expect_outside_waiter();
      if (const auto queue = queue_.lock()) queue->hurry();
    }
    void settled() override {
      if (const auto queue = queue_.lock()) queue->tell_settled();
    }

   private:
    const std::weak_ptr<CallQueue> queue_;
  };
  struct Entry {
    Job job;
    std::shared_ptr<Work> work;
    Clock::time_point given;
    size_t next = 0;           // of its calls
    bool carried_out = false;  // what follows is left to another thread
    std::exception_ptr error{};
  };
  /// What a thread that carries calls on does for them.
  struct Effort {
    bool spin = false;            ///< waits for peers a moment
    bool run_callbacks = true;    ///< runs what follows a completion
    const Work* until = nullptr;  ///< null: all
    Awaited* awaited = nullptr;   ///< what the thread sleeps on next, if a call waits for a peer
  };
  /// Counts a thread that waits in here, for as long as it lives.
  struct Assisting;
  struct Turn;

  void await(const Work& work, const Deadline& deadline);
  void await_turn(const Work& work, const Deadline& deadline);
  bool advance_all(const Effort& effort);
  bool advance_one(Entry& entry, const Effort& effort);
  void finish();
  void hurry();
  void complete(Work& work, std::shared_ptr<void> keep, const std::exception_ptr& error);
  bool take_turn();
  bool take_turn_locked();
  void leave_turn();
  bool is_whole() const;
  void tell_settled();
  void loop();
  void rest(std::unique_lock<std::mutex>& lock);
  Clock::duration too_early() const;

  Engine& engine_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;       // of the turn, of what is pending
  std::condition_variable given_;         // to the queue's own thread
  std::deque<Entry> entries_;             // guarded by mutex_; the first stays where it is until it is complete
  std::atomic<Entry*> first_{nullptr};    // of them; written under mutex_; the owner of the turn alone follows it
  std::atomic<std::thread::id> owner_{};  // of the turn; written under mutex_
  int depth_ = 0;                         // of the turn: its owner may take it again
  std::atomic<bool> begun_{false};        // the first entry's call
  int assistants_ = 0;                    // guarded by mutex_, like all below
  int waiting_for_turn_ = 0;
  bool stop_ = false;
  bool asleep_ = false;     // the thread must be woken
  bool hurry_ = false;      // it is not to wait for others
  uint64_t submitted_ = 0;  // ever
  std::atomic<int> pending_{0};
  std::atomic<std::thread::id> thread_id_{};
  std::thread thread_;  // made when first needed
};

}  // namespace ringlet
