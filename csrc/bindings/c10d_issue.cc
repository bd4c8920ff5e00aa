#include "bindings/c10d_issue.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <algorithm>

#include "base/error.h"
#include "bindings/arguments.h"
#include "bindings/authored.h"
#include "bindings/profiled.h"
#include "bindings/tensors.h"
#include "engine/selector.h"

namespace ringlet {

Reduction reduction_of(const c10d::ReduceOp& op) {
  switch (op.op_) {
    case c10d::ReduceOp::SUM: return {ReduceOp::sum};
    case c10d::ReduceOp::AVG: return {ReduceOp::avg};
    case c10d::ReduceOp::PRODUCT: return {ReduceOp::product};
    case c10d::ReduceOp::MIN: return {ReduceOp::min};
    case c10d::ReduceOp::MAX: return {ReduceOp::max};
    case c10d::ReduceOp::BAND: return {ReduceOp::band};
    case c10d::ReduceOp::BOR: return {ReduceOp::bor};
    case c10d::ReduceOp::BXOR: return {ReduceOp::bxor};
    case c10d::ReduceOp::PREMUL_SUM: {
      const auto* supplement = dynamic_cast<const c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
      if (supplement == nullptr)
        throw InvalidUsage("PREMUL_SUM must have a factor: make the operation with its factor");
      const auto& factor = supplement->tensor_factor;
      return {ReduceOp::premul_sum, factor.defined() ? factor.item<double>() : supplement->double_factor};
    }
    default: throw InvalidUsage("op must be one of SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR, PREMUL_SUM");
  }
}

C10dBackend::Issue::Step& C10dBackend::Issue::add(Collective collective, const at::Tensor& output,
                                                  const at::Tensor& input, int64_t count) {
  Step& step = steps.emplace_back();
  step.call.collective = collective;
  step.call.count = static_cast<size_t>(count);
  step.call.timeout = timeout;
  step.call.label = call_label();
  for (const at::Tensor* tensor : {&output, &input}) {
    if (tensor->defined()) check_dense(*tensor, call(), tensor == &output ? "output" : "input");
  }
  // Another dense order of elements, such as channels_last, is copied too: other ranks may have another order.
  const auto contiguous = [](const at::Tensor& tensor) { return !tensor.defined() || tensor.is_contiguous(); };
  at::Tensor from = input, to = output;
  if (!contiguous(output) || !contiguous(input)) {
    const at::NoGradGuard no_grad;
    const bool only_reads = collective == Collective::broadcast && input.defined();  // at the root
    if (output.defined() && !only_reads) check_apart({output}, call());
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
    profiled.push_back(input);
    if (output.defined()) check_dtype(output, dtype_of(input), call());
  }
  return step;
}

C10dBackend::Issue::Step& C10dBackend::Issue::add_blocks(Collective collective, const Tensors& outputs,
                                                         const Tensors& inputs, std::vector<size_t> counts) {
  const bool even = std::all_of(counts.begin(), counts.end(), [&](size_t count) { return count == counts[0]; });
  const bool on_host = (inputs.empty() ? outputs.at(0) : inputs[0]).is_cpu();
  if (even && !on_host) return add_packed(collective, outputs, inputs);
  Step& step = steps.emplace_back();
  step.blocks = std::make_unique<Blocks>();
  Blocks& blocks = *step.blocks;
  check_outputs(outputs);
  const DType dtype = dtype_of(inputs.empty() ? outputs.at(0) : inputs[0]);
  for (const at::Tensor& input : inputs) blocks.inputs.push_back(readable(input, dtype));
  for (const at::Tensor& output : outputs) blocks.outputs.push_back(writable(output, dtype));
  blocks.longest = *std::max_element(counts.begin(), counts.end());
  blocks.uneven = !even;
  blocks.counts = std::move(counts);
  step.call.collective = collective;
  step.call.timeout = timeout;
  step.call.label = call_label();
  step.call.count = blocks.longest;
  step.call.dtype = dtype;
  step.call.blocks = step.blocks.get();
  profiled.insert(profiled.end(), inputs.begin(), inputs.end());
  return step;
}

/// On a GPU equal blocks are packed into one tensor, and unpacked from one.
C10dBackend::Issue::Step& C10dBackend::Issue::add_packed(Collective collective, const Tensors& outputs,
                                                         const Tensors& inputs) {
  check_outputs(outputs);
  const DType dtype = dtype_of(inputs.empty() ? outputs[0] : inputs[0]);
  const int64_t block = (inputs.empty() ? outputs[0] : inputs[0]).numel();
  const at::Tensor input = packed(inputs, dtype, /*received=*/false);
  Step& step = add(collective, packed(outputs, dtype, /*received=*/true), input, block);
  profiled.pop_back();
  profiled.insert(profiled.end(), inputs.begin(), inputs.end());  // the tensors of the caller
  return step;
}

at::Tensor C10dBackend::Issue::packed(const Tensors& tensors, DType dtype, bool received) {
  int64_t elements = 0;
  for (const at::Tensor& tensor : tensors) {
    check_dense(tensor, call(), received ? "output" : "input");
    check_dtype(tensor, dtype, call());
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

void C10dBackend::Issue::set(const Reduction& reduction) {
  steps.back().call.op = reduction.op;
  steps.back().call.scale = reduction.scale;
}

void C10dBackend::Issue::set_root(int64_t root, int world) {
  check_root(steps.back().call.collective, root, world);
  steps.back().call.root = static_cast<int>(root);
}

void C10dBackend::Issue::check_outputs(const Tensors& outputs) const {
  for (const at::Tensor& output : outputs) check_dense(output, call(), "output");
  check_apart(outputs, call());
}

namespace {

struct Range {
  const std::byte *begin, *end;
};

/// The memory that a call writes, or reads.
std::vector<Range> ranges_of(const Call& call, int rank, int world, bool outputs) {
  std::vector<Range> ranges;
  const auto add = [&](const std::byte* begin, size_t elements) {
    if (begin != nullptr) ranges.push_back({begin, begin + elements * element_size(call.dtype)});
  };
  if (call.blocks == nullptr) {
    add(outputs ? call.output : call.input,
        outputs ? output_elements(call, rank, world) : input_elements(call, rank, world));
    return ranges;
  }
  const std::vector<std::byte*>& tensors = outputs ? call.blocks->outputs : call.blocks->inputs;
  const bool own = tensors.size() == 1;  // this rank's block; in a list each is a rank's
  for (size_t i = 0; i < tensors.size(); ++i) add(tensors[i], call.blocks->counts[own ? rank : i]);
  return ranges;
}

}  // namespace

void C10dBackend::Issue::check_results(int rank, int world) const {
  if (steps.size() < 2) return;
  check_apart(results, call());
  for (size_t later = 1; later < steps.size(); ++later) {
    const Call& reads = steps[later].call;
    if (reads.blocks == nullptr && reads.input == reads.output) continue;  // what it writes is apart from all else
    for (const Range& read : ranges_of(reads, rank, world, /*outputs=*/false)) {
      for (size_t i = 0; i < later; ++i) {
        for (const Range& written : ranges_of(steps[i].call, rank, world, /*outputs=*/true)) {
          if (written.begin >= read.end || written.end <= read.begin) continue;
          throw InvalidUsage(std::string(call()) +
                             ": the output of a coalesced call must not overlap the input of a later "
                             "one: give each its own memory");
        }
      }
    }
  }
}

std::byte* C10dBackend::Issue::readable(const at::Tensor& tensor, DType dtype) {
  check_dense(tensor, call(), "input");
  check_dtype(tensor, dtype, call());
  keep.push_back(staging.readable(tensor));
  return data_of(keep.back());
}

std::byte* C10dBackend::Issue::writable(const at::Tensor& tensor, DType dtype) {
  check_dtype(tensor, dtype, call());
  keep.push_back(staging.writable(tensor));
  return data_of(keep.back());
}

MemoryHold C10dBackend::Issue::hold() const {
  MemoryHold hold(keep);
  for (const at::Tensor& original : staging.originals()) hold.add(original);
  return hold;
}

bool C10dBackend::Issue::single() const { return steps.size() == 1 && staging.empty(); }

/// The results are delivered in the calls' turn: a later call may take the same tensors.
Communicator::Job C10dBackend::Issue::whole() const {
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

std::vector<Call> C10dBackend::calls_of(const Issue& issue) {
  std::vector<Call> calls;
  for (const Issue::Step& step : issue.steps) calls.push_back(step.call);
  return calls;
}

C10dBackend::Handle C10dBackend::issue(Issue&& issue) {
  issue.check_results(getRank(), getSize());
  for (Issue::Step& step : issue.steps) {
    Call& call = step.call;
    if (call.collective == Collective::all_reduce) call.algorithm = named_algorithm(call.collective, algorithm_);
    agree_on_added(*group_, call);  // first: check() asks the schedules
    group_->check(call);
  }
  const c10::Device device = issue.device();
  if (!device.is_cpu()) return issue_on(device, std::move(issue));
  for (const Issue::Step& step : issue.steps) check_on_host(step.call);
  const Title title{issue.type, issue.title, group_->sequence()};
  auto handle = c10::make_intrusive<C10dWork>(getRank(), title, std::move(issue.results), issue.profiled);
  const auto profiled =
      profiling() ? std::make_shared<Profiled>(nullptr, Tensors{}) : nullptr;  // the handle's is around
  for (Issue::Step& step : issue.steps) step.call.observer = profiled.get();
  if (!issue.async) {
    const MemoryHold hold = issue.hold();
    issue.single() ? group_->run(issue.steps[0].call) : group_->run(issue.whole());
    if (profiled) profiled->end();
    handle->complete(nullptr);
    return handle;
  }
  const auto held = std::make_shared<Issue>(std::move(issue));
  auto keep = std::make_shared<std::pair<MemoryHold, std::shared_ptr<Issue>>>(held->hold(), held);
  const bool plain = !held->job && held->staging.empty();
  auto work = held->single() ? group_->start(held->steps[0].call, std::move(keep))
              : plain        ? group_->start(calls_of(*held), std::move(keep))
                             : group_->start(held->whole(), std::move(keep));
  if (profiled) work->note_end([profiled](const std::exception_ptr&) { profiled->end(); });
  C10dWork::follow(handle, std::move(work));
  return remember(std::move(handle));
}

/// The host only puts the calls on a stream: what follows there is in order, whether or not it is asynchronous.
C10dBackend::Handle C10dBackend::issue_on(const c10::Device& device, Issue&& issue) {
  DeviceCalls calls{.device = device, .tensors = issue.keep, .async = issue.async};
  for (const at::Tensor& original : issue.staging.originals()) calls.tensors.push_back(original);
  for (const Issue::Step& step : issue.steps) calls.calls.push_back(step.call);
  if (issue.staging.collects()) calls.collect = [&issue] { issue.staging.collect(); };
  if (!issue.staging.empty()) calls.deliver = [&issue] { issue.staging.deliver(); };
  const Title title{issue.type, issue.title, group_->sequence()};
  auto handle = c10::make_intrusive<C10dWork>(getRank(), title, issue.results, issue.profiled, device);
  C10dWork::follow(handle, enqueue(*group_, calls));
  return remember(std::move(handle));
}

}  // namespace ringlet
