// What torch.profiler sees of a call: an event over the call, and inside it one that bears the algorithm's name and
// begins when the ranks have agreed on it. The time between the two beginnings is the wait for ranks that came late.
//
// Contract: where nobody profiles, profile() is one question to torch, and gives null. The first event is of the thread
// that makes the call, the second of the thread that runs it.
// Thread safety: those two threads may differ; they do not meet in here.
#pragma once

#include <ATen/ThreadLocalState.h>
#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>

#include <memory>
#include <optional>
#include <vector>

#include "engine/call.h"

namespace ringlet {

class Profiled final : public CallObserver {
 public:
  /// `title`: of the event over the call; null where somebody else makes it. `tensors`: for their shapes.
  Profiled(const char* title, const std::vector<at::Tensor>& tensors);
  ~Profiled() { end(); }
  Profiled(const Profiled&) = delete;

  void chosen(const Choice& choice) override;
  /// The call is complete. From any thread.
  void end();

 private:
  const at::ThreadLocalState maker_;  // the profiler belongs to the thread that makes the call
  std::optional<at::RecordFunction> call_, carried_out_;
};

/// Null where nobody profiles; else what `call` is observed by from now on.
std::shared_ptr<Profiled> profile(Call& call, const at::Tensor* output, const at::Tensor* input);

inline bool profiling() { return at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE).has_value(); }

}  // namespace ringlet
