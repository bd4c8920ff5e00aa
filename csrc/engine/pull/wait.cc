#include "engine/pull/wait.h"

#include <utility>

#include "engine/pull/peer_reads.h"

namespace ringlet {

namespace {

using namespace std::chrono_literals;

// The longest single sleep, after which a thread checks for failures. It also bounds the delay by a missed wake-up. A
// wake-up can be missed if the publishing path has no fence (PullExecutor::publish) and its store is still in the store
// buffer.
constexpr int64_t kSleepNanoseconds = 1'000'000;
constexpr size_t kMostText = 600;  // of the text on other ranks' waits: an error has room for Control::kMessageBytes

}  // namespace

void Waiter::wait(const Waiting& waiting, uint64_t target, bool background) {
  const OutsideRuntime outside;
  Ongoing ongoing(waiting.timeout);
  if (!background && yield_until(waiting.reached)) return;
  while (!waiting.reached()) {
    check_for_interrupt(waiting.context);
    look(waiting, ongoing);
    sleep_on_peer(waiting.peer, target, kSleepNanoseconds);
  }
  end(ongoing);
}

void Waiter::look(const Waiting& waiting, Ongoing& ongoing) {
  const auto now = Deadline::Clock::now();
  const bool look_at_process = now - ongoing.looked >= kProcessCheckEvery;
  if (look_at_process) ongoing.looked = now;
  if (look_at_process && !std::exchange(ongoing.told, true)) {
    transport_.control().in_collective.set(waiting.context());
  }
  examine(waiting, ongoing.deadline, look_at_process);
}

void Waiter::sleep_on_peer(int peer, uint64_t target, int64_t nanoseconds) noexcept {
  const std::atomic<uint64_t>& progress = transport_.control(peer).progress;
  sleepers_.fetch_add(1, std::memory_order_relaxed);
  transport_.control().sleeping_on.store(1 + static_cast<uint32_t>(peer), std::memory_order_seq_cst);
  const uint64_t value = progress.load(std::memory_order_acquire);
  if (value < target) sleep_on(progress, value, nanoseconds);
  if (sleepers_.fetch_sub(1, std::memory_order_relaxed) == 1) {
    transport_.control().sleeping_on.store(0, std::memory_order_relaxed);
  }
}

bool Waiter::is_awaited() const noexcept {
  const uint32_t self = 1 + static_cast<uint32_t>(transport_.rank());
  for (int q = 0; q < transport_.world(); ++q) {
    if (transport_.control(q).sleeping_on.load(std::memory_order_acquire) == self) return true;
  }
  return false;
}

void Waiter::examine(const Waiting& waiting, const Deadline& deadline, bool look_at_process) {
  const std::string peer = waiting.peer < 0 ? "any rank" : "rank " + std::to_string(waiting.peer);
  if (aborted_.load(std::memory_order_acquire)) {
    const std::lock_guard lock(mutex_);
    rethrow(ErrorKind::peer_lost, calls_.with_last_calls(ErrorKind::peer_lost, abort_reason_));
  }
  if (const int q = rank_that_failed(); q >= 0) {
    if (waiting.reached()) return;
    const auto [kind, text] = reported(q, waiting.context());
    fail(kind, text);
  }
  if (waiting.check) waiting.check();
  bool left = true;
  for (int q = 0; q < transport_.world(); ++q) {
    if (q == waiting.peer || (waiting.peer < 0 && q != transport_.rank())) left = left && has_left(q);
  }
  if (left) {
    if (waiting.reached()) return;
    fail(ErrorKind::peer_lost, waiting.context() + ": " + peer +
                                   " left the group: it finished early, or raised an error: look at its output");
  }
  if (look_at_process) {
    for (int q = 0; q < transport_.world(); ++q) {
      if (!is_gone(q)) continue;
      if (waiting.reached()) return;
      fail(ErrorKind::peer_lost, waiting.context() + ": the process of rank " + std::to_string(q) +
                                     " is gone; look at that rank's own output for the cause");
    }
  }
  if (deadline.passed()) {
    fail(ErrorKind::timeout, waiting.context() + ": Timed out having waited " + in_seconds(waiting.timeout) + " for " +
                                 peer + ", whose process is there" + (waiting.behind ? waiting.behind() : "") +
                                 waiting_as_well(waiting) +
                                 "; it may be in other work, or stuck (timeout= raises the limit)");
  }
}

/// For an error: a rank in a message and a rank in a collective may wait for each other, and each must name both.
std::string Waiter::waiting_as_well(const Waiting& waiting) const {
  std::string text;
  for (int q = 0; q < transport_.world(); ++q) {
    if (q == transport_.rank()) continue;
    const Control& control = transport_.control(q);
    const bool asked = q == waiting.peer || waiting.peer < 0;
    for (const std::string& in :
         {waiting.message && asked ? control.in_collective.get() : "", control.in_message.get()}) {
      if (!in.empty() && text.size() < kMostText) text += "; waiting as well: " + in;
    }
  }
  return text;
}

bool Waiter::has_left(int q) const {
  return transport_.control(q).presence.load(std::memory_order_acquire) == static_cast<uint32_t>(Presence::left);
}

/// Its process ended before it left the group. After a rank has left, the end of its process is no failure.
bool Waiter::is_gone(int q) const { return !transport_.alive(q) && !has_left(q); }

/// -1: no rank has reported an error.
int Waiter::rank_that_failed() const {
  for (int q = 0; q < transport_.world(); ++q) {
    if (transport_.control(q).failed.load(std::memory_order_acquire) != 0) return q;
  }
  return -1;
}

std::pair<ErrorKind, std::string> Waiter::reported(int failed, const std::string& context) const {
  const Control& control = transport_.control(failed);
  const auto kind = static_cast<ErrorKind>(control.failed.load(std::memory_order_acquire) - 1);
  return {kind, context + ": rank " + std::to_string(failed) + " reported: " + control.message};
}

void Waiter::poll_failures() {
  std::optional<std::pair<ErrorKind, std::string>> found;
  {
    const std::lock_guard lock(mutex_);
    if (!departed_) found = trouble();
  }
  if (found) fail(found->first, found->second);
}

/// The error that a peer reported, or the end of a peer that reported none.
std::optional<std::pair<ErrorKind, std::string>> Waiter::trouble() const {
  const std::string self = "rank " + std::to_string(transport_.rank());
  if (const int q = rank_that_failed(); q >= 0) return reported(q, self);
  for (int q = 0; q < transport_.world(); ++q) {
    if (q == transport_.rank() || !is_gone(q)) continue;
    return std::pair(ErrorKind::peer_lost, self + ": the process of rank " + std::to_string(q) +
                                               " is gone; look at that rank's own output for the cause");
  }
  return std::nullopt;
}

std::string Waiter::poison(ErrorKind kind, const std::string& message) noexcept {
  std::string told = in_words([&] { return calls_.with_last_calls(kind, message); });
  const std::lock_guard lock(mutex_);
  // The peers first: when other threads of this rank see the failure, they return tensors that peers may still read
  // (peer_reads.h). Under the lock, because two threads of this rank may report, and depart() unmaps the regions.
  if (!departed_) transport_.control().fail(kind, message.c_str());
  fence(std::memory_order_seq_cst);
  if (failure_.set(kind, told)) calls_.failed(kind, told);
  return told;
}

void Waiter::fail(ErrorKind kind, const std::string& message) { rethrow(kind, poison(kind, message)); }

void Waiter::abort(const std::string& reason) {
  leave();  // first, because a wait that ends returns tensors that peers may still read
  const std::lock_guard lock(mutex_);
  failure_.set(ErrorKind::peer_lost, reason);
  abort_reason_ = in_words([&] { return reason; });
  aborted_.store(true, std::memory_order_release);
}

/// Tells the peers that this rank makes no more calls, and waits for their reads of its tensors (peer_reads.h): not
/// under the lock, because a peer that reads may be about to report an error, and its own leave() may wait for this
/// rank.
void Waiter::leave() noexcept {
  {
    const std::lock_guard lock(mutex_);
    if (departed_) return;
    ++leaving_;
    transport_.control().presence.store(static_cast<uint32_t>(Presence::left), std::memory_order_release);
  }
  {
    const FailureFence told(transport_);
  }
  const std::lock_guard lock(mutex_);
  if (--leaving_ == 0) left_.notify_all();
}

void Waiter::depart() noexcept {
  leave();
  std::unique_lock lock(mutex_);
  if (std::exchange(departed_, true)) return;
  left_.wait(lock, [&] { return leaving_ == 0; });
  transport_.depart();
}

}  // namespace ringlet
