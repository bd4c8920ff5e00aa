// Whether what was read in a peer's tensor, where it lies, is what the peer gave.
//
// Contract: a rank whose call ends badly has its tensors back while peers may still be reading them. It tells the peers
// first (Control::failed, Presence::left) and lets go then. Who reads looks for that after its reads, and before it
// says that it is done with them: either it sees that the peer gave up, or all was read before the peer let go.
// Thread safety: confirm as Waiter::examine, the rest from any thread.
#pragma once

#include <atomic>
#include <chrono>

#include "base/deadline.h"
#include "engine/pull/wait.h"
#include "transport/transport.h"

namespace ringlet {

inline void fence([[maybe_unused]] std::memory_order order) {
#if !defined(__SANITIZE_THREAD__)  // which knows none
  std::atomic_thread_fence(order);
#endif
}

/// Stands between what the peers are told and what is done to tensors after its end.
class FailureFence {
 public:
  FailureFence() = default;
  ~FailureFence() { fence(std::memory_order_seq_cst); }
  FailureFence(const FailureFence&) = delete;
  FailureFence& operator=(const FailureFence&) = delete;
};

/// After reads in the peer's tensor: throws where it may have been another's by then. `context` as a Waiting's.
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
