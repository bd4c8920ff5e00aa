// The events of a call for torch.profiler: one for the whole call, and inside it one with the algorithm's name, which
// begins when the ranks have agreed. The time between the two starts is the wait for late ranks.
//
// A call may complete after the profiler has stopped and freed what it recorded. Its events then do not end: torch
// would write into that memory. Each leaks a few hundred bytes. One race is left, as in torch: a call that ends within the
// microsecond in which another thread stops the profiler.
//
// Contract: if no profiler runs, profile() only asks torch and returns null. The first event belongs to the thread that
// makes the call, the second to the thread that runs it.
// Thread safety: the two threads may differ; apart from that race they share no state here.
#pragma once

#include <ATen/ThreadLocalState.h>
#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>

#include <memory>
#include <vector>

#include "engine/call.h"

namespace ringlet {

class Profiled final : public CallObserver {
 public:
  /// `title`: the name of the call's event. `tensors`: for their shapes.
  Profiled(const char* title, const std::vector<at::Tensor>& tensors);
  ~Profiled() { end(); }
  Profiled(const Profiled&) = delete;

  void chosen(const Choice& choice) override;
  /// The call is complete. From any thread.
  void end();

 private:
  using Event = std::unique_ptr<at::RecordFunction>;
  void end(Event& event);

  const at::ThreadLocalState maker_;  // the profiler belongs to the thread that makes the call
  Event call_, carried_out_;
};

/// Observes `call` from now on; null if no profiler runs.
std::shared_ptr<Profiled> profile(Call& call, const at::Tensor* output, const at::Tensor* input);

inline bool profiling() { return at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE).has_value(); }

}  // namespace ringlet
