#include "engine/pull/wait.h"

#include <utility>

#include "engine/pull/peer_reads.h"

namespace ringlet {

namespace {

using namespace std::chrono_literals;

// The longest single sleep, after which a thread checks for failures. It also bounds the delay by a missed wake-up. A
// wake-up can be missed if the publishing path has no fence (PullExecutor::publish) and its store is still in the store
// buffer.
constexpr std::chrono::nanoseconds kSleep = 1ms;  ///< the longest sleep at a stretch

}  // namespace

void Waiter::wait(const Waiting& waiting, uint64_t target, bool background) {
  const OutsideRuntime outside;
  auto looked = waiting.began;
  if (!background && yield_until(waiting.reached)) return;
  while (!waiting.reached()) {
    health_.check_interrupts(waiting.context);
    look(waiting, looked);
    sleep_on_peer(waiting.peer, target, kSleep);
  }
  health_.end_call();
}

void Waiter::look(const Waiting& waiting, Deadline::Clock::time_point& looked) {
  const auto now = Deadline::Clock::now();
  const bool closely = now - looked >= kProcessCheckEvery;
  if (closely) looked = now;
  health_.examine(waiting, closely ? Health::Look::ends : Health::Look::reports, now);
}

void Waiter::sleep_on_peer(int peer, uint64_t target, std::chrono::nanoseconds most) noexcept {
  const std::atomic<uint64_t>& progress = transport_.control(peer).progress;
  sleepers_.fetch_add(1, std::memory_order_relaxed);
  transport_.control().sleeping_on.store(1 + static_cast<uint32_t>(peer), std::memory_order_seq_cst);
  const uint64_t value = progress.load(std::memory_order_acquire);
  if (value < target) sleep_on(progress, value, std::min(most, kSleep).count());
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

/// Under the lock, because depart() unmaps the regions.
void Waiter::poll(Health::Look look) {
  using Kind = Health::Report::Kind;
  const std::lock_guard lock(mutex_);
  for (int q = 0; q < transport_.world() && !departed_; ++q) {
    if (q == transport_.rank()) continue;
    const Control& control = transport_.control(q);
    if (const uint32_t failed = control.failed.load(std::memory_order_acquire); failed != 0) {
      health_.on_report(q, {.kind = Kind::error,
                            .error = static_cast<ErrorKind>((failed & 0xff) - 1),
                            .origin = static_cast<int>(failed >> 8),
                            .text = control.message});
    }
    const bool left = control.left.load(std::memory_order_acquire) != 0;
    if (left) health_.on_report(q, {.kind = Kind::goodbye});
    if (look == Health::Look::reports) continue;
    // After a rank has left, the end of its process is no failure.
    if (!left && !transport_.alive(q)) health_.on_closed(q, false, "");
    if (look == Health::Look::ends) continue;
    const std::string in_collective = control.in_collective.get(), in_message = control.in_message.get();
    health_.on_report(q, {.kind = Kind::waiting, .text = in_collective});
    health_.on_report(q, {.kind = Kind::in_message, .text = in_message});
  }
}

/// Returns when the peers read no tensor of this rank any more (peer_reads.h), if they were told that it ends its calls:
/// not under the lock, because a peer that reads may be about to report an error, and may wait for this rank.
bool Waiter::send(const Health::Report& report) noexcept {
  using Kind = Health::Report::Kind;
  {
    const std::lock_guard lock(mutex_);
    if (departed_) return true;
    Control& control = transport_.control();
    switch (report.kind) {
      case Kind::waiting: control.in_collective.set(report.text); return true;
      case Kind::in_message: control.in_message.set(report.text); return true;
      case Kind::error: control.fail(report.error, report.origin, report.text); break;
      case Kind::goodbye: control.left.store(1, std::memory_order_release); break;
    }
    ++sending_;
  }
  {
    const FailureFence told(transport_);
  }
  const std::lock_guard lock(mutex_);
  if (--sending_ == 0) sent_.notify_all();
  return true;
}

void Waiter::depart() noexcept {
  std::unique_lock lock(mutex_);
  if (std::exchange(departed_, true)) return;
  sent_.wait(lock, [&] { return sending_ == 0; });
  transport_.depart();
}

}  // namespace ringlet
