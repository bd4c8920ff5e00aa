#include "comm/gpu_group.h"

#include <algorithm>

#include "base/thread.h"
#include "comm/communicator.h"

namespace ringlet {
namespace {

constexpr std::chrono::milliseconds kGlance{1};      // between two looks at the pending calls
constexpr std::chrono::milliseconds kLookEvery{20};  // between two looks at the peers, each of which is a system call
constexpr std::chrono::seconds kGoodbye{2};

}  // namespace

GpuGroup::GpuGroup(Communicator& host, const GpuExecutors::Parts& parts)
    : host_(host), engines_(std::in_place, host, parts) {
  watch_ = start_thread("calls on a GPU", [this] {
    engines_->device().use(engines_->number());  // otherwise a look at an event would make a context on device 0
    watch();
    for (void* event : events_) engines_->device().destroy_event(event);
    engines_.reset();
  });
}

GpuGroup::~GpuGroup() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = Deadline::after(kGoodbye);
    changed_.notify_all();
  }
  watch_.join();
}

std::shared_ptr<Work> GpuGroup::run(Call call, void* stream) {
  host_.check(call);
  if (call.timeout.count() <= 0) call.timeout = host_.timeout();
  return give(stream, call.timeout, [&] {
    call.sequence = sequence_;
    engines_->run(call, stream);
    ++sequence_;
  });
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
  return give(stream, timeout, [&] { engines_->exchange(messages, timeout, stream); });
}

/// A refused call changes nothing; a later failure ends the group. All calls use the same scratch or staging buffers,
/// so a call waits for the last one if that is on another stream.
std::shared_ptr<Work> GpuGroup::give(void* stream, std::chrono::milliseconds timeout,
                                     const std::function<void()>& enqueue) {
  auto work = std::make_shared<Work>();
  {
    const std::lock_guard lock(mutex_);
    const RingletCudaDevice& device = engines_->device();
    int captured = 0;
    device_call(device.capturing(stream, &captured), "asking whether a stream is captured");
    if (captured == 0 && !pending_.empty() && pending_.back().stream != stream) {
      device_call(device.wait(stream, pending_.back().event), "waiting for an event");
    }
    try {
      enqueue();
    } catch (const InvalidUsage&) {
      throw;
    } catch (const Error& error) {
      host_.poison(error);
      throw;
    }
    if (captured == 0) {
      void* done = event();
      device_call(device.record(done, stream), "recording an event");
      const bool idle = pending_.empty();
      pending_.push_back({done, stream, Deadline::after(timeout), engines_->last_call(), work});
      if (idle)
        changed_
            .notify_all();  // otherwise it looks soon by itself; woken for each call it would stand in the next's way
      return work;
    }
  }
  work->complete(nullptr);
  return work;
}

/// Runs on a thread of its own. The caller's thread may use another device, on which this would make a context. And the
/// watch thread may run a callback, which may need a lock that the caller holds.
void GpuGroup::abort(const std::string& reason) {
  start_thread("the end of calls on a GPU", [&] {
    const std::lock_guard lock(mutex_);
    engines_->device().use(engines_->number());
    engines_->abort(ErrorKind::peer_lost, reason);
  }).join();
}

void* GpuGroup::event() {
  if (events_.empty()) {
    void* made = nullptr;
    device_call(engines_->device().create_event(&made), "making an event");
    return made;
  }
  void* free = events_.back();
  events_.pop_back();
  return free;
}

void GpuGroup::watch() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return stop_ || !pending_.empty(); });
    if (pending_.empty()) return;
    Ended ended;
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

void GpuGroup::look(Ended& ended) {
  try {
    const size_t through = finished();
    const bool late = pending_.size() > through && pending_[through].deadline.passed();
    const bool cut_short = pending_.size() > through && stop_ && stop_->passed();
    if (cut_short) engines_->abort(ErrorKind::invalid_usage, "the group was closed before this call was complete");
    check(/*closely=*/through > 0 || late || cut_short);  // before the completions: an aborted call looks finished
    look_at_peers();
    for (size_t i = 0; i < through; ++i) {
      events_.push_back(pending_.front().event);
      ended.emplace_back(std::move(pending_.front().work), nullptr);
      pending_.pop_front();
    }
    if (!late) return;
    throw Timeout(
        pending_.front().what + " on rank " + std::to_string(host_.rank()) + " of " + std::to_string(host_.world()) +
        " was not done at the deadline: some rank has not made this call, made another, or is stuck before it");
  } catch (const Error& error) {
    host_.poison(error);  // first: the peers must get the error, whatever the abort waits for
    engines_->abort(error.kind(), error.what());
    for (Pending& call : pending_) {
      events_.push_back(call.event);
      ended.emplace_back(std::move(call.work), std::current_exception());
    }
    pending_.clear();
  }
}

/// A kernel knows only which rank waited for which. If a peer's host has reported more, that error is thrown.
void GpuGroup::check(bool closely) {
  try {
    engines_->check(closely);
  } catch (const Timeout&) {
    next_look_ = Deadline::after(std::chrono::milliseconds(0));
    try {
      look_at_peers();
    } catch (const Timeout&) {  // the kernel's error is all that is known
    }
    throw;
  }
}

/// An error of a peer is reported as one of the first pending call.
void GpuGroup::look_at_peers() {
  host_.raise_if_failed();
  if (!next_look_.passed()) return;
  next_look_ = Deadline::after(kLookEvery);
  try {
    host_.poll_failures();
  } catch (const Error& error) {
    rethrow(error.kind(), pending_.front().what + " on a GPU: " + error.what());
  }
}

/// How many of the pending calls the device has completed, from the first.
size_t GpuGroup::finished() const {
  size_t through = 0;
  for (const Pending& call : pending_) {
    int answer = 0;
    device_call(engines_->device().finished(call.event, &answer), call.what.c_str());
    if (answer == 0) break;
    ++through;
  }
  return through;
}

void GpuGroup::device_call(int code, const char* what) const {
  if (code != 0) throw DeviceError(std::string(what) + ": " + engines_->device().explain(code));
}

}  // namespace ringlet
