#include "gpu/launch_thread.h"

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <utility>

#include "base/start_thread.h"

namespace ringlet {
namespace {

// A launch takes some 10 us, about as long as waking a thread: both sides look so often before they sleep.
constexpr int kQuickTries = 200;
constexpr std::chrono::milliseconds kPollEvery{20};
constexpr std::chrono::seconds kLastWait{1};

}  // namespace

struct LaunchThread::Shared {
  void loop() {
    for (uint64_t next = 1;; ++next) {
      for (int i = 0; i < kQuickTries && given.load() < next; ++i) std::this_thread::yield();
      std::function<int()> act;
      {
        std::unique_lock lock(mutex);
        changed.wait(lock, [&] { return given.load() >= next || stop; });
        if (stop) break;
        act = std::move(call);
      }
      const int got = act();
      act = nullptr;
      const std::lock_guard lock(mutex);
      result = got;
      done.store(next);
      changed.notify_all();
    }
    if (last) std::exchange(last, nullptr)();  // set before `stop`, and never again
    const std::lock_guard lock(mutex);
    ended = true;
    changed.notify_all();
  }

  std::mutex mutex;
  std::condition_variable changed;
  std::function<int()> call;                // guarded by mutex, as all but the two counts are
  std::atomic<uint64_t> given{0}, done{0};  // calls; changed under mutex
  int result = 0;
  std::function<void()> last;  // written before `stop`; then the thread's
  bool stop = false, ended = false;
};

LaunchThread::LaunchThread(const std::function<void()>& enter)
    : shared_(std::make_shared<Shared>()), thread_(start_thread("launches on a GPU", [shared = shared_, enter] {
        if (enter) enter();
        shared->loop();
      })) {}

LaunchThread::~LaunchThread() { finish({}, kLastWait) ? thread_.join() : thread_.detach(); }

bool LaunchThread::finish(std::function<void()> last, std::chrono::milliseconds most) {
  std::unique_lock lock(shared_->mutex);
  if (!std::exchange(shared_->stop, true)) shared_->last = std::move(last);
  shared_->changed.notify_all();
  return shared_->changed.wait_for(lock, most, [&] { return shared_->ended; });
}

std::optional<int> LaunchThread::run(std::function<int()> call, const Deadline& deadline,
                                     const std::function<bool()>& poll) {
  std::unique_lock lock(shared_->mutex);
  if (shared_->stop || shared_->given.load() != shared_->done.load()) return std::nullopt;  // behind one given up
  shared_->call = std::move(call);
  const uint64_t number = ++shared_->given;
  shared_->changed.notify_all();
  lock.unlock();
  const auto through = [&] { return shared_->done.load() >= number; };
  for (int i = 0; i < kQuickTries && !through(); ++i) std::this_thread::yield();
  lock.lock();
  while (!through()) {
    if (deadline.passed()) return std::nullopt;
    shared_->changed.wait_for(lock, std::min(kPollEvery, deadline.left()), through);
    if (through()) break;
    lock.unlock();
    if (poll()) return std::nullopt;
    lock.lock();
  }
  return shared_->result;
}

}  // namespace ringlet
