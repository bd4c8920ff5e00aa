#include "bindings/c10d_issue.h"

#include "base/error.h"
#include "bindings/arguments.h"
#include "bindings/gil.h"
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

void C10dBackend::Issue::add(Collective collective, const at::Tensor& output, const at::Tensor& input, int64_t count) {
  ringlet::Issue::add(
      {.collective = collective, .label = call_label(), .count = static_cast<size_t>(count), .timeout = timeout},
      output, input);
}

void C10dBackend::Issue::add_blocks(Collective collective, const Tensors& outputs, const Tensors& inputs,
                                    std::vector<size_t> counts) {
  ringlet::Issue::add_blocks({.collective = collective, .label = call_label(), .timeout = timeout}, outputs, inputs,
                             std::move(counts));
}

void C10dBackend::Issue::set(const Reduction& reduction) {
  steps.back().call.op = reduction.op;
  steps.back().call.scale = reduction.scale;
}

void C10dBackend::Issue::set_root(int64_t root, int world) {
  check_root(steps.back().call.collective, root, world);
  steps.back().call.root = static_cast<int>(root);
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
  check_apart(results, call);
  for (size_t later = 1; later < steps.size(); ++later) {
    const Call& reads = steps[later].call;
    if (reads.blocks == nullptr && reads.input == reads.output) continue;  // what it writes is apart from all else
    for (const Range& read : ranges_of(reads, rank, world, /*outputs=*/false)) {
      for (size_t i = 0; i < later; ++i) {
        for (const Range& written : ranges_of(steps[i].call, rank, world, /*outputs=*/true)) {
          if (written.begin >= read.end || written.end <= read.begin) continue;
          throw InvalidUsage(std::string(call) +
                             ": the output of a coalesced call must not overlap the input of a later "
                             "one: give each its own memory");
        }
      }
    }
  }
}

C10dBackend::Handle C10dBackend::issue(Issue&& issue) {
  const ComesBackToTorch comes_back;
  issue.check_results(getRank(), getSize());
  for (Issue::Step& step : issue.steps) {
    if (step.call.collective == Collective::all_reduce) {
      step.call.algorithm = named_algorithm(step.call.collective, algorithm_);
    }
  }
  issue.check(*group_);
  const c10::Device device = issue.device();
  const Title title{issue.type, issue.title, group_->sequence()};
  if (!device.is_cpu()) {  // the host only puts the calls on a stream: what follows there is in order
    auto handle = c10::make_intrusive<C10dWork>(getRank(), title, issue.results, issue.inputs, device);
    C10dWork::follow(handle, enqueue(*group_, issue.on(device, issue.async)));
    return remember(std::move(handle));
  }
  for (const Issue::Step& step : issue.steps) check_on_host(step.call);
  auto handle = c10::make_intrusive<C10dWork>(getRank(), title, std::move(issue.results), issue.inputs);
  for (Issue::Step& step : issue.steps) step.call.observer = handle->profiled();
  if (!issue.async) {
    issue.run(*group_);
    handle->complete(nullptr);
    return handle;
  }
  auto work = static_cast<ringlet::Issue&&>(issue).start(*group_);
  C10dWork::follow(handle, std::move(work));
  return remember(std::move(handle));
}

}  // namespace ringlet
