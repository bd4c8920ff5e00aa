// Checks that data which a rank read in place in a peer's tensor are the data of the call.
//
// Contract: a rank whose call fails returns its tensors to the caller while peers may still read them. It first tells
// the peers (Control::failed, Presence::left), and then returns the tensors. A reader checks for that after its reads,
// and before it tells the peer that it is done. So either the reader sees that the peer has failed, or it has
// read everything before the peer returned its tensors.
// Thread safety: confirm as Waiter::examine, the rest from any thread.
#pragma once

#include <atomic>
#include <chrono>

#include "base/deadline.h"
#include "engine/pull/wait.h"
#include "transport/transport.h"

namespace ringlet {

inline void fence([[maybe_unused]] std::memory_order order) {
#if !defined(__SANITIZE_THREAD__)  // ThreadSanitizer does not support fences
  std::atomic_thread_fence(order);
#endif
}

/// The destructor is the fence between the report to the peers and the return of the tensors.
class FailureFence {
 public:
  FailureFence() = default;
  ~FailureFence() { fence(std::memory_order_seq_cst); }
  FailureFence(const FailureFence&) = delete;
  FailureFence& operator=(const FailureFence&) = delete;
};

/// After reads in the peer's tensor: throws if the peer may have changed it. `context` as in Waiting.
template <typename Context>
void confirm(const Transport& transport, Waiter& waiter, int peer, const Context& context) {
  fence(std::memory_order_acquire);
  const Control& control = transport.control(peer);
  const bool left = control.presence.load(std::memory_order_relaxed) == static_cast<uint32_t>(Presence::left);
  if (!left && control.failed.load(std::memory_order_relaxed) == 0) [[likely]]
    return;
  Waiting waiting;
  waiting.peer = peer;
  waiting.timeout = std::chrono::milliseconds::max();
  waiting.reached = [] { return false; };
  waiting.context = [&] {
    return context() + ", reading the tensor of rank " + std::to_string(peer) + ", which may have changed meanwhile";
  };
  waiter.examine(waiting, Deadline::after(waiting.timeout), false);
}

}  // namespace ringlet
