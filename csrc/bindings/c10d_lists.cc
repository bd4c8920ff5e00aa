// The backend's collectives on lists of tensors, which calls read and write in place, and on uneven blocks.
#include <algorithm>

#include "base/error.h"
#include "bindings/c10d_issue.h"
#include "bindings/lists.h"
#include "bindings/tensors.h"

namespace ringlet {

using c10d::OpType;

namespace {

const std::vector<at::Tensor>& only_list(const std::vector<std::vector<at::Tensor>>& lists, const char* call) {
  if (lists.size() != 1) {
    throw InvalidUsage(std::string(call) + ": each rank must pass one list of tensors, got " +
                       std::to_string(lists.size()));
  }
  return lists[0];
}

/// The elements for each rank: `splits` rows each, or equal parts if there are no splits. Throws InvalidUsage if the
/// splits do not fit.
std::vector<size_t> split_counts(const std::vector<int64_t>& splits, const at::Tensor& tensor, int world,
                                 const char* role) {
  const int64_t rows = tensor.dim() > 0 ? tensor.size(0) : tensor.numel();
  int64_t total = 0;
  for (const int64_t split : splits) {
    if (split < 0) {
      throw InvalidUsage(std::string("all_to_all: ") + role + " splits must be 0 or more, got " +
                         std::to_string(split));
    }
    total += split;
  }
  const bool fit = splits.empty() ? rows % world == 0 : splits.size() == static_cast<size_t>(world) && total == rows;
  if (!fit) {
    const std::string ranks = std::to_string(world) + " ranks", given = std::to_string(rows);
    throw InvalidUsage(
        std::string("all_to_all: the ") + role +
        (splits.empty() ? " tensor's first dimension must be a multiple of " + ranks + ", got " + given
                        : " splits must be one for each of " + ranks + " and add up to the first dimension (" + given +
                              "), got " + std::to_string(splits.size()) + " that add up to " + std::to_string(total)));
  }
  const int64_t row = rows == 0 ? 0 : tensor.numel() / rows;
  std::vector<size_t> counts(world, static_cast<size_t>(tensor.numel() / world));
  for (size_t i = 0; i < splits.size(); ++i) counts[i] = static_cast<size_t>(splits[i] * row);
  return counts;
}

std::vector<at::Tensor> cut(const at::Tensor& tensor, const std::vector<size_t>& counts) {
  const at::Tensor flat = tensor.view({-1});
  std::vector<at::Tensor> parts;
  int64_t offset = 0;
  for (const size_t count : counts) {
    parts.push_back(flat.narrow(0, offset, static_cast<int64_t>(count)));
    offset += static_cast<int64_t>(count);
  }
  return parts;
}

}  // namespace

C10dBackend::Handle C10dBackend::allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  return part([&] {
    refuse_none(tensors, "all_reduce_coalesced");
    Issue call(OpType::ALLREDUCE_COALESCED, "ringlet:all_reduce", options);
    for (const at::Tensor& tensor : tensors) {
      call.add(Collective::all_reduce, tensor, tensor, tensor.numel());
      call.set(reduction_of(options.reduceOp));
    }
    call.results = tensors;
    return issue(std::move(call));
  });
}

C10dBackend::Handle C10dBackend::allgather(Lists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  const Tensors& list = only_list(outputs, "all_gather");
  std::vector<size_t> counts = chunk_counts(Collective::all_gather, list, inputs, getRank(), getSize());
  Issue call(OpType::ALLGATHER, "ringlet:all_gather", options);
  call.add_blocks(Collective::all_gather, list, inputs, std::move(counts));
  call.results = list;
  return issue(std::move(call));
}

/// outputs[q][i] receives rank q's inputs[i].
C10dBackend::Handle C10dBackend::allgather_coalesced(Lists& outputs, Tensors& inputs,
                                                     const c10d::AllgatherOptions& options) {
  refuse_none(inputs, "all_gather_coalesced");
  check_length(outputs.size(), getSize(), "all_gather_coalesced");
  Issue call(OpType::ALLGATHER_COALESCED, "ringlet:all_gather", options);
  for (size_t i = 0; i < inputs.size(); ++i) {
    Tensors list;
    for (const Tensors& of_rank : outputs) {
      check_pairs(of_rank, inputs, "all_gather_coalesced");
      list.push_back(of_rank[i]);
    }
    check_own(inputs[i], list[getRank()], getRank(), "all_gather_coalesced");
    call.add_blocks(Collective::all_gather, list, {inputs[i]}, counts_of(list));
    call.results.insert(call.results.end(), list.begin(), list.end());
  }
  return issue(std::move(call));
}

C10dBackend::Handle C10dBackend::reduce_scatter(Tensors& outputs, Lists& inputs,
                                                const c10d::ReduceScatterOptions& options) {
  const Tensors& list = only_list(inputs, "reduce_scatter");
  std::vector<size_t> counts = chunk_counts(Collective::reduce_scatter, outputs, list, getRank(), getSize());
  Issue call(OpType::REDUCE_SCATTER, "ringlet:reduce_scatter", options);
  call.add_blocks(Collective::reduce_scatter, outputs, list, std::move(counts));
  call.set(reduction_of(options.reduceOp));
  call.results = outputs;
  return issue(std::move(call));
}

C10dBackend::Handle C10dBackend::gather(Lists& outputs, Tensors& inputs, const c10d::GatherOptions& options) {
  const at::Tensor& input = only(inputs, "gather");
  Issue call(OpType::GATHER, "ringlet:gather", options);
  if (options.rootRank == getRank()) {
    const Tensors& list = only_list(outputs, "gather");
    call.add_blocks(Collective::gather, list, inputs,
                    chunk_counts(Collective::gather, list, inputs, getRank(), getSize()));
    call.results = list;
  } else {
    call.add(Collective::gather, {}, input, input.numel());
  }
  call.set_root(options.rootRank, getSize());
  return issue(std::move(call));
}

#if RINGLET_TORCH_HAS_GATHER_SINGLE
C10dBackend::Handle C10dBackend::gather_single(at::Tensor& output, at::Tensor& input,
                                               const c10d::GatherOptions& options) {
  const bool root = options.rootRank == getRank();
  const int64_t expected = input.numel() * getSize();
  if (root && output.numel() != expected) refuse_elements("gather", "output", output, expected, getSize());
  Issue call(OpType::GATHER, "ringlet:gather", options);
  call.add(Collective::gather, root ? output : at::Tensor(), input, input.numel());
  call.set_root(options.rootRank, getSize());
  if (root) call.results = {output};
  return issue(std::move(call));
}
#endif

C10dBackend::Handle C10dBackend::scatter(Tensors& outputs, Lists& inputs, const c10d::ScatterOptions& options) {
  const at::Tensor& output = only(outputs, "scatter");
  Issue call(OpType::SCATTER, "ringlet:scatter", options);
  if (options.rootRank == getRank()) {
    const Tensors& list = only_list(inputs, "scatter");
    call.add_blocks(Collective::scatter, outputs, list,
                    chunk_counts(Collective::scatter, outputs, list, getRank(), getSize()));
  } else {
    call.add(Collective::scatter, output, {}, output.numel());
  }
  call.set_root(options.rootRank, getSize());
  call.results = outputs;
  return issue(std::move(call));
}

C10dBackend::Handle C10dBackend::alltoall_base(at::Tensor& output, at::Tensor& input, Splits& output_splits,
                                               Splits& input_splits, const c10d::AllToAllOptions& options) {
  check_tensor(output, "all_to_all", "output");
  check_tensor(input, "all_to_all", "input");
  std::vector<size_t> to = split_counts(input_splits, input, getSize(), "input");
  const std::vector<size_t> from = split_counts(output_splits, output, getSize(), "output");
  Issue call(OpType::ALLTOALL_BASE, "ringlet:all_to_all", options);
  if (input_splits.empty() && output_splits.empty()) {
    if (input.numel() != output.numel()) refuse_elements("all_to_all", "output", output, input.numel(), getSize());
    call.add(Collective::all_to_all, output, input, static_cast<int64_t>(to[0]));
  } else {
    const Tensors outputs = cut(output, from), inputs = cut(input, to);
    to.insert(to.end(), from.begin(), from.end());
    call.add_blocks(Collective::all_to_all, outputs, inputs, std::move(to));
    call.inputs = {input};
  }
  call.results = {output};
  return issue(std::move(call));
}

C10dBackend::Handle C10dBackend::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) {
  std::vector<size_t> counts = chunk_counts(Collective::all_to_all, outputs, inputs, getRank(), getSize());
  Issue call(OpType::ALLTOALL, "ringlet:all_to_all", options);
  call.add_blocks(Collective::all_to_all, outputs, inputs, std::move(counts));
  call.results = outputs;
  return issue(std::move(call));
}

}  // namespace ringlet
