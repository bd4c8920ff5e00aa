#include "comm/call_queue.h"

#include <pthread.h>

#include <algorithm>
#include <utility>

#include "base/interrupts.h"
#include "base/start_thread.h"
#include "comm/reentrancy.h"

namespace ringlet {
namespace {

using namespace std::chrono_literals;

// The thread leaves a call to others for this long: to wake it costs about as much.
constexpr auto kGrace = 200us;  ///< how long an asynchronous call is left to threads that may come
// The same where it would take the processor from the rank's own computation, and no peer sleeps until this rank goes on.
// A peer may ask again and again whether its call is complete, and this rank may wait for something else.
constexpr auto kPatience = 5ms;  ///< the same if the thread would compute in turns with its rank
// While calls are given, the thread checks this often whether one was left alone, so that nobody need wake it. Without a
// free processor each check interrupts the rank's computation.
constexpr auto kLook = 1ms;  ///< how often the queue's thread looks for such calls, while calls are given
constexpr auto kLookInTurns = 16ms;
constexpr int kLooksBeforeSleep = 20;
// The longest sleep without a look whether it is needed.
constexpr auto kSleep = 1ms;
constexpr int kSpinsForTurn = 2000;

}  // namespace

struct CallQueue::Assisting {
  explicit Assisting(CallQueue& of) : queue(of), mark(&of) {
    const std::lock_guard lock(queue.mutex_);
    ++queue.assistants_;
  }
  ~Assisting() {
    const std::lock_guard lock(queue.mutex_);
    if (--queue.assistants_ > 0) return;
    if (queue.stop_) queue.changed_.notify_all();
  }
  CallQueue& queue;
  Waits mark;
};

CallQueue::CallQueue(Engine& engine) : engine_(engine) {}

void CallQueue::end() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
    given_.notify_one();
  }
  if (thread_.joinable()) thread_.join();
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return assistants_ == 0 && owner_.load(std::memory_order_relaxed) == std::thread::id{}; });
}

void CallQueue::make_ready() {
  const std::lock_guard lock(mutex_);
  if (!thread_.joinable()) thread_ = start_thread("asynchronous calls", [this] { loop(); });
}

std::shared_ptr<Work> CallQueue::submit(Job job) {
  auto work = std::make_shared<Queued>(weak_from_this());
  work->set_title(std::move(job.title));
  const bool whole = static_cast<bool>(job.whole);
  const std::lock_guard lock(mutex_);
  const bool first = entries_.empty();
  entries_.push_back({std::move(job), work, Clock::now()});
  pending_.fetch_add(1, std::memory_order_acq_rel);
  if (first) first_.store(&entries_.front(), std::memory_order_release);
  ++submitted_;
  if (std::exchange(asleep_, false) || (whole && first)) given_.notify_one();
  return work;
}

std::shared_ptr<Work> CallQueue::reserve(std::function<std::string()> title) {
  auto work = std::make_shared<Work>();
  work->set_title(std::move(title));
  pending_.fetch_add(1, std::memory_order_acq_rel);
  return work;
}

void CallQueue::run_reserved(Work& work, const std::function<void()>& job, std::shared_ptr<void> keep) {
  std::exception_ptr error;
  try {
    job();
  } catch (...) {
    error = std::current_exception();
  }
  complete(work, std::move(keep), error);
  tell_settled();
}

bool CallQueue::wait_idle(std::chrono::milliseconds timeout) {
  const Deadline deadline = Deadline::after(timeout);
  std::shared_ptr<Work> last;
  {
    const std::lock_guard lock(mutex_);
    if (!entries_.empty()) last = entries_.back().work;
  }
  if (last) {
    const Uninterrupted whole;  // the thread that ends a group checks for signals between two of these waits
    await(*last, deadline);
  }
  std::unique_lock lock(mutex_);
  return changed_.wait_for(lock, deadline.left(), [&] { return !pending(); });
}

/// Takes the turn if no other thread has it.
bool CallQueue::take_turn() {
  const std::lock_guard lock(mutex_);
  return take_turn_locked();
}

bool CallQueue::take_turn_locked() {
  if (owner_.load(std::memory_order_relaxed) == std::thread::id{}) {
    owner_.store(std::this_thread::get_id(), std::memory_order_relaxed);
  } else if (!has_turn()) {
    return false;
  }
  ++depth_;
  return true;
}

void CallQueue::leave_turn() {
  const std::lock_guard lock(mutex_);
  if (--depth_ > 0) return;
  owner_.store(std::thread::id{}, std::memory_order_relaxed);
  if (waiting_for_turn_ > 0 || stop_) changed_.notify_all();
  if (stop_ || (!entries_.empty() && entries_.front().job.whole)) given_.notify_one();
}

struct CallQueue::Turn {
  ~Turn() { queue.leave_turn(); }
  CallQueue& queue;
};

void CallQueue::progress(bool given) {
  {
    const std::lock_guard lock(mutex_);
    if (entries_.empty()) return;
    if (given && entries_.back().job.large && engine_.overlaps()) {
      given_.notify_one();  // it runs beside the caller's own computation
      return;
    }
    if (!take_turn_locked()) return;
  }
  const Turn turn{*this};
  advance_all({.run_callbacks = false});
}

void CallQueue::hurry() {
  const std::lock_guard lock(mutex_);
  if (entries_.empty()) return;
  hurry_ = true;
  given_.notify_one();
}

void CallQueue::await(const Work& work, const Deadline& deadline) {
  std::optional<Assisting> assisting;  // from before the turn is left: end() must not return while the engine is used
  Awaited awaited;
  while (!work.done() && !deadline.passed()) {
    bool held_up = false;
    if (take_turn()) {
      const Turn turn{*this};
      advance_all({.spin = true, .until = &work, .awaited = &awaited});
      if (work.done()) return;
      if (!assisting) assisting.emplace(*this);
      held_up = begun_;
    } else if (!assisting) {
      assisting.emplace(*this);
    }
    if (held_up) {
      engine_.sleep(awaited, std::min<std::chrono::nanoseconds>(kInterruptCheckEvery, deadline.left()));
    } else {
      await_turn(work, deadline);
    }
    check_interrupts();
  }
}

/// Waits until the thread with the turn has completed the job or leaves the turn.
void CallQueue::await_turn(const Work& work, const Deadline& deadline) {
  for (int i = 0; i < kSpinsForTurn; ++i) {
    if (work.done() || (owner_.load(std::memory_order_relaxed) == std::thread::id{} && !is_whole())) return;
    ::sched_yield();
  }
  std::unique_lock lock(mutex_);
  ++waiting_for_turn_;
  const auto free = [&] {
    const bool mine = entries_.empty() || !entries_.front().job.whole;
    return work.done() || (mine && owner_.load(std::memory_order_relaxed) == std::thread::id{});
  };
  changed_.wait_for(lock, std::min(deadline.left(), kInterruptCheckEvery), free);
  --waiting_for_turn_;
}

/// Whether only the queue's thread may run the next job.
bool CallQueue::is_whole() const {
  const std::lock_guard lock(mutex_);
  return !entries_.empty() && entries_.front().job.whole;
}

/// Carries jobs on in order, until one must wait for a peer or for another thread. Returns whether none is left. The
/// caller holds the turn.
bool CallQueue::advance_all(const Effort& effort) {
  while (effort.until == nullptr || !effort.until->done()) {
    Entry* const entry = first_.load(std::memory_order_acquire);
    if (entry == nullptr) return true;
    if (!entry->carried_out && !advance_one(*entry, effort)) return false;
    entry->carried_out = true;
    begun_ = false;
    if (!effort.run_callbacks && entry->work->exposed()) return false;
    finish();
  }
  return false;
}

bool CallQueue::advance_one(Entry& entry, const Effort& effort) {
  const bool own = std::this_thread::get_id() == thread_id_.load(std::memory_order_relaxed);
  const bool in_callback = effort.spin && depth_ > 1;  // which waits for the job, and holds the turn meanwhile
  if (entry.job.whole && !own && !in_callback) return false;
  begun_ = true;
  try {
    if (entry.job.whole) {
      entry.job.whole();
      return true;
    }
    for (; entry.next <= entry.job.later.size(); ++entry.next) {
      const Call& call = entry.next == 0 ? entry.job.call : entry.job.later[entry.next - 1];
      if (!engine_.advance(call, effort.spin, effort.awaited)) return false;
    }
  } catch (...) {
    entry.error = std::current_exception();
  }
  return true;
}

/// The first job is complete.
void CallQueue::finish() {
  Entry entry;
  {
    const std::lock_guard lock(mutex_);
    entry = std::move(entries_.front());
    entries_.pop_front();
    first_.store(entries_.empty() ? nullptr : &entries_.front(), std::memory_order_release);
    if (entries_.empty()) hurry_ = false;
  }
  complete(*entry.work, std::move(entry.job.keep), entry.error);
}

/// Before a thread can see the job complete, `keep` is released, and a synchronous call after a wait() runs in its own
/// thread.
void CallQueue::complete(Work& work, std::shared_ptr<void> keep, const std::exception_ptr& error) {
  keep.reset();
  pending_.fetch_sub(1, std::memory_order_acq_rel);
  work.complete(error);
}

void CallQueue::tell_settled() {
  const std::lock_guard lock(mutex_);
  if (waiting_for_turn_ > 0 || !pending()) changed_.notify_all();
}

void CallQueue::loop() {
  ::pthread_setname_np(::pthread_self(), "ringlet");
  Awaited awaited;
  std::unique_lock lock(mutex_);
  thread_id_.store(std::this_thread::get_id(), std::memory_order_relaxed);
  while (true) {
    if (entries_.empty()) {
      if (stop_) return;
      rest(lock);
      continue;
    }
    if (const auto early = too_early(); early.count() > 0) {
      given_.wait_for(lock, early);
      continue;
    }
    lock.unlock();
    bool held_up = false;
    if (take_turn()) {
      const Turn turn{*this};
      held_up = !advance_all({.awaited = &awaited}) && begun_;
    }
    if (held_up) engine_.sleep(awaited, kInterruptCheckEvery);
    lock.lock();
  }
}

/// How long the thread leaves the first job to others; it looks again when the job is twice as old.
CallQueue::Clock::duration CallQueue::too_early() const {
  const Entry& first = entries_.front();
  if (owner_.load(std::memory_order_relaxed) != std::thread::id{}) return kSleep;
  if (assistants_ > 0 && !stop_ && !first.job.whole) return kSleep;
  if (stop_ || hurry_ || first.job.whole || (first.job.large && engine_.overlaps())) return {};
  const auto age = Clock::now() - first.given;
  const Clock::duration left = (engine_.overlaps() || engine_.is_awaited() ? kGrace : kPatience) - age;
  return std::min(left, std::max<Clock::duration>(age, kGrace));
}

/// Without a job: checks now and then while calls are given, then sleeps.
void CallQueue::rest(std::unique_lock<std::mutex>& lock) {
  const Clock::duration look = engine_.overlaps() ? kLook : kLookInTurns;
  for (int looks = 0; looks < kLooksBeforeSleep; ++looks) {
    const uint64_t seen = submitted_;
    given_.wait_for(lock, look);
    if (stop_ || !entries_.empty()) return;
    if (seen != submitted_) looks = 0;
  }
  asleep_ = true;
  given_.wait(lock, [&] { return stop_ || !asleep_; });
  asleep_ = false;
}

}  // namespace ringlet
