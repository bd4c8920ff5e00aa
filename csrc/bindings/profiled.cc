#include "bindings/profiled.h"

#include <torch/csrc/profiler/orchestration/observer.h>

#include "engine/call_log.h"

namespace ringlet {
namespace {

/// With the thread state of the call's maker: whether the profiler that ran there then still runs. When it stops, it
/// removes its callback.
bool still_runs() {
  struct State : torch::profiler::impl::ProfilerStateBase {
    static bool runs(const ProfilerStateBase& state) { return state.*(&State::handle_) != 0; }
  };
  using Base = torch::profiler::impl::ProfilerStateBase;
  auto* const state = dynamic_cast<Base*>(c10::ThreadLocalDebugInfo::get(c10::DebugInfoKind::PROFILER_STATE));
  return state == nullptr || State::runs(*state);
}

std::unique_ptr<at::RecordFunction> made() {
  auto event = std::make_unique<at::RecordFunction>(at::RecordScope::USER_SCOPE);
  event->_setAsync();  // it may end on another thread
  return event;
}

}  // namespace

Profiled::Profiled(const char* title, const std::vector<at::Tensor>& tensors) {
  const std::vector<c10::IValue> inputs(tensors.begin(), tensors.end());
  call_ = made();
  call_->before(title, c10::ArrayRef<const c10::IValue>(inputs.data(), inputs.size()));
}

void Profiled::chosen(const Choice& choice) {
  const at::ThreadLocalStateGuard guard(maker_);
  end(carried_out_);
  if (!still_runs()) return;
  carried_out_ = made();
  carried_out_->before("ringlet:" + std::string(choice.algorithm->name) + ", " + choice.memory);
}

void Profiled::end() {
  if (!call_ && !carried_out_) return;
  const at::ThreadLocalStateGuard guard(maker_);
  end(carried_out_);
  end(call_);
}

void Profiled::end(Event& event) {
  if (event && !still_runs()) event.release();  // its destructor would end it
  event.reset();
}

std::shared_ptr<Profiled> profile(Call& call, const at::Tensor* output, const at::Tensor* input) {
  if (!profiling()) [[likely]]
    return nullptr;
  std::vector<at::Tensor> tensors;
  for (const at::Tensor* tensor : {input, output}) {
    if (tensor != nullptr && (tensors.empty() || !tensors[0].is_same(*tensor))) tensors.push_back(*tensor);
  }
  auto profiled = std::make_shared<Profiled>(("ringlet:" + std::string(name(call.collective))).c_str(), tensors);
  call.observer = profiled.get();
  return profiled;
}

}  // namespace ringlet
