#include "gpu/gpu_group.h"

#include <algorithm>
#include <utility>

#include "base/start_thread.h"
#include "gpu/check_device.h"

namespace ringlet {
namespace {

constexpr std::chrono::milliseconds kGlance{1};      // between two looks at what is pending
constexpr std::chrono::milliseconds kIdle{20};       // ... at whether a launch has begun, which wakes nobody
constexpr std::chrono::milliseconds kLookEvery{20};  // at the peers: whether they are there is a system call
constexpr std::chrono::seconds kGoodbye{2};
void* const kPerThread = reinterpret_cast<void*>(2);  // cudaStreamPerThread

}  // namespace

GpuGroup::GpuGroup(HostGroup& host, const GpuExecutors::Parts& parts)
    : host_(host),
      engines_(std::make_unique<GpuExecutors>(host, parts)),
      device_(engines_->device()),
      number_(engines_->number()),
      shares_default_stream_(engines_->shares_default_stream()),
      description_(engines_->describe()) {
  watch_ = start_thread("calls on a GPU", [this] {
    device_.use(number_);  // otherwise a look at an event would make a context on device 0
    do {
      watch();
    } while (!dismiss());
  });
}

void GpuGroup::end() {
  if (!watch_.joinable()) return;
  {
    const std::lock_guard lock(mutex_);
    stop_ = Deadline::after(kGoodbye);
    changed_.notify_all();
  }
  watch_.join();
}

/// Ends the executors, unless a thread is in a call. Such a thread is not waited for here: it may need the watch.
bool GpuGroup::dismiss() {
  std::unique_ptr<GpuExecutors> engines;
  {
    std::unique_lock lock(mutex_);
    const std::unique_lock turn(order_, std::try_to_lock);
    if (!turn) changed_.wait_for(lock, kGlance);
    if (!turn || !pending_.empty()) return false;
    if (!ended_) ended_ = std::make_exception_ptr(InvalidUsage("a call on a GPU on a group that was closed"));
    for (void* event : events_) device_.destroy_event(event);
    events_.clear();
    engines = std::move(engines_);
  }
  return true;
}

std::shared_ptr<Work> GpuGroup::run(Call call, void* stream) {
  host_.check(call);
  if (call.timeout.count() <= 0) call.timeout = host_.timeout();
  const std::lock_guard turn(order_);
  call.sequence = sequence_;
  const auto enqueue = [&] {
    engines_->run(call, stream);
    ++sequence_;
  };
  return give(stream, call.timeout, enqueue, [&] { return ringlet::describe(call); });
}

std::shared_ptr<Work> GpuGroup::exchange(std::vector<Message> messages, void* stream) {
  std::chrono::milliseconds timeout{0};
  for (Message& message : messages) {
    host_.check(message);
    const char* why = message.peer == kAnySource ? "from any source" : message.tag != 0 ? "with a tag" : nullptr;
    if (why != nullptr) {
      throw InvalidUsage(std::string(message.sending ? "send " : "recv ") + why +
                         " is not supported on a GPU: name the peer, and leave the tag at 0");
    }
    if (message.timeout.count() <= 0) message.timeout = host_.timeout();
    timeout = std::max(timeout, message.timeout);
  }
  const std::lock_guard turn(order_);
  const auto enqueue = [&] { engines_->exchange(messages, timeout, stream); };
  return give(stream, timeout, enqueue, [&] { return ringlet::describe(messages); });
}

/// With order_ held. What is refused leaves all as it was; what fails later ends the group.
std::shared_ptr<Work> GpuGroup::give(void* stream, std::chrono::milliseconds timeout,
                                     const std::function<void()>& enqueue, const std::function<std::string()>& what) {
  if (stream == kPerThread) {
    throw InvalidUsage(what() +
                       " on a GPU: cudaStreamPerThread is another stream in each thread, and NCCL's launches "
                       "come from a thread of the group's; make the call on a stream that was created");
  }
  auto work = std::make_shared<Work>();
  {
    const std::lock_guard lock(mutex_);
    if (ended_) std::rethrow_exception(ended_);
  }
  int captured = 0;
  check_device(device_, device_.capturing(stream, &captured), "asking whether a stream is captured");
  const Launch launch{Deadline::after(timeout), what};
  // Made early: what is launched is watched, also when memory is short.
  std::list<Pending> entry{{nullptr, stream, launch.deadline, "", work}};
  std::exception_ptr failed;
  void* done = nullptr;
  try {
    begin(launch, stream, captured != 0);
    enqueue();
    if (captured == 0) check_device(device_, device_.record(done = event(), stream), "recording an event");
    answer_watch();
  } catch (const InvalidUsage&) {
    failed = std::current_exception();
  } catch (const Timeout& error) {
    const Timeout named(behind_oldest(error));
    host_.health().poison(named);
    failed = std::make_exception_ptr(named);
  } catch (const Error& error) {
    host_.health().poison(error);
    failed = std::current_exception();
  } catch (const std::exception&) {  // such as bad_alloc: the peers may be in the call
    host_.health().poison_in_flight([&] { return what() + " on a GPU"; });
    failed = std::current_exception();
  }
  const std::lock_guard lock(mutex_);
  launch_.reset();
  if (done != nullptr && (ended_ || failed)) events_.push_back(done);
  // If another thread ended all while a launch waited, what the launch says is not the cause.
  if (ended_) std::rethrow_exception(ended_);
  if (failed) std::rethrow_exception(failed);
  if (captured != 0) {
    work->complete(nullptr);
    return work;
  }
  const bool idle = pending_.empty();
  entry.front().event = done;
  entry.front().what = in_words([&] { return engines_->last_call(); });
  pending_.splice(pending_.end(), entry);
  if (idle) changed_.notify_all();  // otherwise it looks soon by itself; woken for each call it would be in the way
  return work;
}

void GpuGroup::follow_calls(void* stream) {
  const std::lock_guard turn(order_);
  if (!engines_) return;
  int captured = 0;
  check_device(device_, device_.capturing(stream, &captured), "asking whether a stream is captured");
  if (captured != 0) return;
  void* behind = nullptr;
  {
    const std::lock_guard lock(mutex_);
    behind = last_elsewhere(stream);
  }
  if (behind != nullptr) check_device(device_, device_.wait(stream, behind), "waiting for an event");
}

/// The event of the last call, if that is on another stream, or null. With mutex_ held.
void* GpuGroup::last_elsewhere(void* stream) const {
  return !pending_.empty() && pending_.back().stream != stream ? pending_.back().event : nullptr;
}

/// All calls use the same scratch, or the same staging buffers: on another stream than the last call's, a call waits
/// for that.
void GpuGroup::begin(const Launch& launch, void* stream, bool captured) {
  void* behind = nullptr;
  {
    const std::lock_guard lock(mutex_);
    if (ended_) std::rethrow_exception(ended_);
    launch_ = launch;
    if (!captured) behind = last_elsewhere(stream);
  }
  // Should it be done and free by now, nothing records it anew before this.
  if (behind != nullptr) check_device(device_, device_.wait(stream, behind), "waiting for an event");
}

/// Runs on a thread of its own. The caller's thread may use another device, on which this would make a context. And the
/// watch thread may run a callback, which may need a lock that the caller holds.
void GpuGroup::abort(const std::string& reason) {
  start_thread("the end of calls on a GPU", [&] {
    const std::lock_guard lock(mutex_);
    if (!engines_) return;
    device_.use(number_);
    engines_->abort(ErrorKind::peer_lost, reason);
  }).join();
}

void* GpuGroup::event() {
  {
    const std::lock_guard lock(mutex_);
    if (!events_.empty()) {
      void* free = events_.back();
      events_.pop_back();
      return free;
    }
  }
  void* made = nullptr;
  check_device(device_, device_.create_event(&made), "making an event");
  return made;
}

void GpuGroup::watch() {
  std::unique_lock lock(mutex_);
  for (Ended ended;; ended.clear()) {
    while (!stop_ && pending_.empty() && !launch_) changed_.wait_for(lock, kIdle);
    if (pending_.empty() && !launch_) return;
    look(ended);
    if (ended.empty()) {
      changed_.wait_for(lock, kGlance);
      continue;
    }
    lock.unlock();  // a callback may make the next call
    for (auto& [work, error] : ended) work->complete(error);
    lock.lock();
  }
}

/// Without memory for it the watch looks again later.
void GpuGroup::look(Ended& ended) {
  try {
    ended.reserve(pending_.size());
    events_.reserve(events_.size() + pending_.size());
    const size_t through = finished_as_far_as_known();
    const bool cut_short = pending_.size() > through && stop_ && stop_->passed();
    if (cut_short) engines_->abort(ErrorKind::invalid_usage, "the group was closed before this call was done");
    check();  // after, since what is aborted looks finished
    look_at_peers();
    for (size_t i = 0; i < through; ++i) {
      events_.push_back(pending_.front().event);
      ended.emplace_back(std::move(pending_.front().work), nullptr);
      pending_.pop_front();
    }
    if (const std::string call = late(); !call.empty()) {
      throw Timeout(not_done(call));
    }
  } catch (const Error& error) {
    end_all(error, ended);
  } catch (const std::bad_alloc&) {
  }
}

/// Within a handler of `error`.
void GpuGroup::end_all(const Error& error, Ended& ended) {
  if (!ended_) {
    ended_ = std::current_exception();
    host_.health().poison(error);  // first: the peers are to hear of it whatever an abort waits for
    engines_->abort(error.kind(), in_words([&] { return std::string(error.what()); }));
  }
  for (Pending& call : pending_) {
    events_.push_back(call.event);
    ended.emplace_back(std::move(call.work), ended_);
  }
  pending_.clear();
  known_ = 0;
}

/// The call that is past its deadline, or "". During a launch it is not known what is finished: then the launch's own
/// deadline counts, which passes after that of any call before with the same timeout.
std::string GpuGroup::late() const {
  if (launch_) return launch_->deadline.passed() ? oldest() : "";
  return !pending_.empty() && pending_.front().deadline.passed() ? pending_.front().what : "";
}

/// A launch waited in vain: behind the oldest call, which need not be its own. What has ended the group says so itself.
std::string GpuGroup::behind_oldest(const Timeout& error) {
  const std::lock_guard lock(mutex_);
  return ended_ ? error.what() : not_done(oldest());
}

std::string GpuGroup::not_done(const std::string& call) const {
  return call + " on rank " + std::to_string(host_.rank()) + " of " + std::to_string(host_.world()) +
         " was not done at the deadline; some rank has not made this call, made another, or is stuck before it";
}

std::string GpuGroup::oldest() const { return pending_.empty() ? launch_->what() : pending_.front().what; }

/// A kernel knows only which rank waited for which, and NCCL knows no call. If a peer's host has reported more, that
/// error is thrown.
void GpuGroup::check() {
  const std::string call = oldest();
  try {
    engines_->check(call);
  } catch (const Timeout& error) {
    next_look_ = Deadline::after(std::chrono::milliseconds(0));
    try {
      look_at_peers();
    } catch (const Timeout&) {  // the kernel's error is all that is known
    }
    if (dynamic_cast<const KernelTimeout*>(&error) == nullptr) throw Timeout(not_done(call));
    throw;
  }
}

/// An error of a peer is reported as one of the first pending call.
void GpuGroup::look_at_peers() {
  host_.health().raise_if_failed();
  if (!next_look_.passed()) return;
  next_look_ = Deadline::after(kLookEvery);
  try {
    host_.health().poll_failures();
  } catch (const Error& error) {
    rethrow(error.kind(), oldest() + " on a GPU: " + error.what(), error.reported());
  }
}

/// What it could not ask the device during this launch, which has returned.
void GpuGroup::answer_watch() {
  const std::lock_guard lock(mutex_);
  if (std::exchange(wanted_, false) && !ended_) known_ = finished();
}

/// Without a question to the device while a launch is under way, which may wait for room with the driver's lock.
size_t GpuGroup::finished_as_far_as_known() {
  const size_t known = std::exchange(known_, 0);
  wanted_ = launch_.has_value();
  return launch_ ? known : finished();
}

/// How many of the pending calls the device is through with, from the first.
size_t GpuGroup::finished() const {
  size_t through = 0;
  for (const Pending& call : pending_) {
    int answer = 0;
    check_device(device_, device_.finished(call.event, &answer), call.what);
    if (answer == 0) break;
    ++through;
  }
  return through;
}

}  // namespace ringlet
