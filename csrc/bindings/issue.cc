#include "bindings/issue.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <algorithm>

#include "base/error.h"
#include "bindings/arguments.h"
#include "bindings/authored.h"
#include "bindings/tensors.h"
#include "engine/selector.h"

namespace ringlet {

void Issue::add(const Call& given, const at::Tensor& output, const at::Tensor& input) {
  Step& step = steps.emplace_back();
  step.call = given;
  for (const at::Tensor* tensor : {&output, &input}) {
    if (tensor->defined()) check_dense(*tensor, call, tensor == &output ? "output" : "input");
  }
  // Another dense order of elements, such as channels_last, is copied too: other ranks may have another order.
  const auto contiguous = [](const at::Tensor& tensor) { return !tensor.defined() || tensor.is_contiguous(); };
  at::Tensor from = input, to = output;
  if (!contiguous(output) || !contiguous(input)) {
    const at::NoGradGuard no_grad;
    const bool only_reads = given.collective == Collective::broadcast && input.defined();  // at the root
    if (output.defined() && !only_reads) check_apart({output}, call);
    if (only_reads) {
      from = to = staging.readable(input);
    } else if (output.defined() && input.defined() && output.is_same(input)) {
      from = to = staging.in_place(output);
    } else {
      if (input.defined()) from = staging.readable(input);
      if (output.defined()) to = staging.writable(output);
    }
  }
  const auto bind = [&](const at::Tensor& tensor) -> std::byte* {
    if (!tensor.defined()) return nullptr;
    step.call.dtype = dtype_of(tensor);
    if (keep.empty() || !keep.back().is_same(tensor)) keep.push_back(tensor);  // once if the call is in place
    return data_of(tensor);
  };
  step.call.input = bind(from);
  step.call.output = bind(to);
  if (input.defined()) {
    inputs.push_back(input);
    if (output.defined()) check_dtype(output, dtype_of(input), call);
  }
}

void Issue::add_blocks(const Call& given, const Tensors& outputs, const Tensors& read, std::vector<size_t> counts) {
  const bool even = std::all_of(counts.begin(), counts.end(), [&](size_t count) { return count == counts[0]; });
  const bool on_host = (read.empty() ? outputs.at(0) : read[0]).is_cpu();
  // Equal blocks of an all-to-all on this rank do not mean equal blocks on all ranks.
  if (even && !on_host && given.collective != Collective::all_to_all) return add_packed(given, outputs, read);
  Step& step = steps.emplace_back();
  step.blocks = std::make_unique<Blocks>();
  Blocks& blocks = *step.blocks;
  check_outputs(outputs);
  const DType dtype = dtype_of(read.empty() ? outputs.at(0) : read[0]);
  for (const at::Tensor& input : read) blocks.inputs.push_back(readable(input, dtype));
  for (const at::Tensor& output : outputs) blocks.outputs.push_back(writable(output, dtype));
  blocks.longest = *std::max_element(counts.begin(), counts.end());
  blocks.uneven = !even;
  blocks.counts = std::move(counts);
  step.call = given;
  step.call.count = blocks.longest;
  step.call.dtype = dtype;
  step.call.blocks = step.blocks.get();
  inputs.insert(inputs.end(), read.begin(), read.end());
}

/// On a GPU equal blocks are packed into one tensor, and unpacked from one, because other ranks may have passed theirs
/// as one.
void Issue::add_packed(const Call& given, const Tensors& outputs, const Tensors& read) {
  check_outputs(outputs);
  const DType dtype = dtype_of(read.empty() ? outputs[0] : read[0]);
  Call of_one = given;
  of_one.count = static_cast<size_t>((read.empty() ? outputs[0] : read[0]).numel());
  const at::Tensor input = packed(read, dtype, /*received=*/false);
  add(of_one, packed(outputs, dtype, /*received=*/true), input);
  inputs.pop_back();
  inputs.insert(inputs.end(), read.begin(), read.end());  // the tensors of the caller
}

at::Tensor Issue::packed(const Tensors& tensors, DType dtype, bool received) {
  int64_t elements = 0;
  for (const at::Tensor& tensor : tensors) {
    check_dense(tensor, call, received ? "output" : "input");
    check_dtype(tensor, dtype, call);
    elements += tensor.numel();
  }
  if (tensors.size() == 1 && tensors[0].is_contiguous()) return tensors[0];
  const at::NoGradGuard no_grad;
  at::Tensor flat = at::empty({elements}, tensors.at(0).options());
  int64_t offset = 0;
  for (const at::Tensor& tensor : tensors) {
    const at::Tensor place = flat.narrow(0, offset, tensor.numel()).view(tensor.sizes());
    offset += tensor.numel();
    keep.push_back(tensor);
    received ? staging.add_output(place, tensor) : staging.add_input(tensor, place);
  }
  return flat;
}

void Issue::check_outputs(const Tensors& outputs) const {
  for (const at::Tensor& output : outputs) check_dense(output, call, "output");
  check_apart(outputs, call);
}

std::byte* Issue::readable(const at::Tensor& tensor, DType dtype) {
  check_dense(tensor, call, "input");
  check_dtype(tensor, dtype, call);
  keep.push_back(staging.readable(tensor));
  return data_of(keep.back());
}

std::byte* Issue::writable(const at::Tensor& tensor, DType dtype) {
  check_dtype(tensor, dtype, call);
  keep.push_back(staging.writable(tensor));
  return data_of(keep.back());
}

MemoryHold Issue::keep_alive() const {
  MemoryHold hold(keep);
  for (const at::Tensor& original : staging.originals()) hold.add(original);
  return hold;
}

/// The results are delivered in the calls' turn: a later call may take the same tensors.
Communicator::Job Issue::whole() const {
  return [this, mode = TorchMode()](const std::function<void(Call)>& run) {
    const auto as_called = mode.enter();
    if (job) {
      job(run);
    } else {
      staging.collect();
      for (const Step& step : steps) run(step.call);
    }
    staging.deliver();
  };
}

void Issue::check(Communicator& group) {
  for (Step& step : steps) {
    agree_on_added(group, step.call);  // first: check() asks the schedules
    group.check(step.call);
  }
}

void Issue::run(Communicator& group) const {
  const MemoryHold held = keep_alive();
  single() ? group.run(steps[0].call) : group.run(whole());
}

std::shared_ptr<Work> Issue::start(Communicator& group) && {
  const auto held = std::make_shared<Issue>(std::move(*this));
  auto keep = std::make_shared<std::pair<MemoryHold, std::shared_ptr<Issue>>>(held->keep_alive(), held);
  if (held->single()) return group.start(held->steps[0].call, std::move(keep));
  if (!held->job && held->staging.empty()) {
    std::vector<Call> calls;
    for (const Step& step : held->steps) calls.push_back(step.call);
    return group.start(calls, std::move(keep));
  }
  auto work = group.start(held->whole(), std::move(keep));
  if (held->steps.size() == 1) {
    work->set_title([signature = call_signature(held->steps[0].call), sequence = group.sequence() - 1] {
      return describe(signature, sequence);
    });
  }
  return work;
}

DeviceCalls Issue::on(const c10::Device& device, bool async) const {
  DeviceCalls calls{.device = device, .tensors = keep, .async = async};
  for (const at::Tensor& original : staging.originals()) calls.tensors.push_back(original);
  for (const Step& step : steps) calls.calls.push_back(step.call);
  if (staging.collects()) calls.collect = [this] { staging.collect(); };
  if (!staging.empty()) calls.deliver = [this] { staging.deliver(); };
  return calls;
}

}  // namespace ringlet
