// Checks that data which a rank read in place in a peer's tensor are the data of the call.
//
// Contract: a rank whose call fails returns its tensors to the caller while peers may still read them. It first tells
// the peers (Control::failed, Control::left), and then returns the tensors. A reader checks for that after its reads,
// and before it tells the peer that it is done. So either the reader sees that the peer has failed, or it has
// read everything before the peer returned its tensors. Registered memory of a process stays mapped, so a late read
// does no harm. Tensors of threads may be unmapped: there the reader says that it reads (Reading), checks, and reads;
// and a rank whose call fails waits until no peer reads. Thread safety: all calls from any thread.
#pragma once

#include <sched.h>

#include <atomic>
#include <chrono>

#include "base/deadline.h"
#include "engine/health.h"
#include "transport/transport.h"

namespace ringlet {

inline void fence([[maybe_unused]] std::memory_order order) {
#if !defined(__SANITIZE_THREAD__)  // ThreadSanitizer does not support fences
  std::atomic_thread_fence(order);
#endif
}

/// The destructor is the fence between the report to the peers and the return of the tensors. If these may be unmapped
/// then, it waits for the reads that are under way.
class FailureFence {
 public:
  FailureFence() = default;
  explicit FailureFence(const Transport& transport) : transport_(transport.unmaps_tensors() ? &transport : nullptr) {}
  ~FailureFence() {
    fence(std::memory_order_seq_cst);
    for (int q = 0; transport_ != nullptr && q < transport_->world(); ++q) {
      if (q == transport_->rank()) continue;
      while (transport_->control(q).reading.load(std::memory_order_seq_cst) != 0) ::sched_yield();
    }
  }
  FailureFence(const FailureFence&) = delete;
  FailureFence& operator=(const FailureFence&) = delete;

 private:
  const Transport* transport_ = nullptr;
};

/// Whether the peer may have changed its tensors, because its call is over.
inline bool may_have_changed(const Transport& transport, int peer) {
  fence(std::memory_order_acquire);
  const Control& control = transport.control(peer);
  return control.left.load(std::memory_order_relaxed) != 0 || control.failed.load(std::memory_order_relaxed) != 0;
}

/// While it lives, no tensor is unmapped of a peer that may not have changed it. It lives for one copy or reduction, for
/// no wait, and not while an error is raised: the raising rank waits until its peers read no more.
class Reading {
 public:
  explicit Reading(const Transport& transport) : control_(transport.unmaps_tensors() ? &transport.control() : nullptr) {
    if (control_ == nullptr) return;
    control_->reading.fetch_add(1, std::memory_order_seq_cst);
    fence(std::memory_order_seq_cst);
  }
  ~Reading() {
    if (control_ != nullptr) control_->reading.fetch_sub(1, std::memory_order_release);
  }
  Reading(const Reading&) = delete;
  Reading& operator=(const Reading&) = delete;

 private:
  Control* const control_;
};

/// Reads in a peer's tensor, unless it may have changed already; then confirm() says why.
template <typename Read>
bool read_tensor(const Transport& transport, int peer, const Read& read) {
  const Reading reading(transport);
  if (may_have_changed(transport, peer)) return false;
  read();
  return true;
}

/// After reads in the peer's tensor: throws if the peer may have changed it. `context` as in Waiting.
template <typename Context>
void confirm(const Transport& transport, Health& health, int peer, const Context& context) {
  if (!may_have_changed(transport, peer)) [[likely]]
    return;
  Waiting waiting;
  waiting.peer = peer;
  waiting.timeout = kLongestTimeout;
  waiting.context = [&] {
    return context() + ", reading the tensor of rank " + std::to_string(peer) + ", which may have changed meanwhile";
  };
  health.examine(waiting, Health::Look::reports);
}

}  // namespace ringlet
