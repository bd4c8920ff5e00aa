#include "bindings/profiled.h"

#include "engine/call_log.h"

namespace ringlet {

Profiled::Profiled(const char* title, const std::vector<at::Tensor>& tensors) {
  if (title == nullptr) return;
  const std::vector<c10::IValue> inputs(tensors.begin(), tensors.end());
  call_.emplace(at::RecordScope::USER_SCOPE);
  call_->_setAsync();  // it may end on another thread
  call_->before(title, c10::ArrayRef<const c10::IValue>(inputs.data(), inputs.size()));
}

void Profiled::chosen(const Choice& choice) {
  const at::ThreadLocalStateGuard guard(maker_);
  carried_out_.reset();
  carried_out_.emplace(at::RecordScope::USER_SCOPE);
  carried_out_->_setAsync();
  carried_out_->before("ringlet:" + std::string(choice.algorithm->name) + ", " + choice.memory);
}

void Profiled::end() {
  if (!call_ && !carried_out_) return;
  const at::ThreadLocalStateGuard guard(maker_);
  carried_out_.reset();
  call_.reset();
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
