#include "bindings/lists.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <string>
#include <utility>

#include "base/error.h"
#include "bindings/tensors.h"

namespace ringlet {
namespace {

void check_length(const std::vector<at::Tensor>& list, int world, const char* call) {
  if (list.size() == static_cast<size_t>(world)) return;
  throw InvalidUsage(std::string(call) + ": a list of " + std::to_string(list.size()) + " tensors for " +
                     std::to_string(world) + " ranks");
}

/// Of gather and scatter only the root sees the list, so blocks must be equal: the others could not know otherwise.
void check_equal(const std::vector<at::Tensor>& list, const at::Tensor& own, const char* call) {
  for (const at::Tensor& tensor : list) {
    if (tensor.numel() == own.numel()) continue;
    throw InvalidUsage(std::string(call) + ": all tensors must have one size; the list has " +
                       std::to_string(tensor.numel()) + " elements where this rank's tensor has " +
                       std::to_string(own.numel()) + " (all_to_all takes uneven ones)");
  }
}

std::vector<size_t> counts_both_ways(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs) {
  std::vector<size_t> counts = counts_of(inputs);
  const std::vector<size_t> from = counts_of(outputs);
  counts.insert(counts.end(), from.begin(), from.end());
  return counts;
}

}  // namespace

const at::Tensor& only(const std::vector<at::Tensor>& tensors, const char* call) {
  if (tensors.size() != 1)
    throw InvalidUsage(std::string(call) + ": one tensor a rank, got " + std::to_string(tensors.size()));
  return tensors[0];
}

std::vector<size_t> counts_of(const std::vector<at::Tensor>& list) {
  std::vector<size_t> counts;
  for (const at::Tensor& tensor : list) counts.push_back(static_cast<size_t>(tensor.numel()));
  return counts;
}

void check_own(const at::Tensor& own, const at::Tensor& in_list, int rank, const char* call) {
  if (own.numel() == in_list.numel()) return;
  throw InvalidUsage(std::string(call) + ": rank " + std::to_string(rank) + "'s tensor has " +
                     std::to_string(own.numel()) + " elements, its place in the list " +
                     std::to_string(in_list.numel()));
}

std::vector<size_t> chunk_counts(Collective collective, const std::vector<at::Tensor>& outputs,
                                 const std::vector<at::Tensor>& inputs, int rank, int world) {
  const char* call = name(collective);
  if (collective == Collective::all_to_all) {
    check_length(inputs, world, call);
    check_length(outputs, world, call);
    return counts_both_ways(outputs, inputs);
  }
  const bool gathers = collective == Collective::all_gather || collective == Collective::gather;
  if (!gathers && collective != Collective::reduce_scatter && collective != Collective::scatter) {
    throw InvalidUsage(std::string(call) + " takes one tensor, not a list");
  }
  const std::vector<at::Tensor>& list = gathers ? outputs : inputs;
  const at::Tensor& own = only(gathers ? inputs : outputs, call);
  check_length(list, world, call);
  if (collective == Collective::gather || collective == Collective::scatter) {
    check_equal(list, own, call);
  } else {
    check_own(own, list[static_cast<size_t>(rank)], rank, call);
  }
  return counts_of(list);
}

at::Tensor packed(const std::vector<at::Tensor>& tensors, bool received) {
  if (tensors.size() == 1) return tensors[0];
  std::vector<at::Tensor> flat;
  int64_t elements = 0;
  for (const at::Tensor& tensor : tensors) {
    flat.push_back(tensor.view({-1}));
    elements += tensor.numel();
  }
  return received ? at::empty({elements}, tensors.at(0).options()) : at::cat(flat);
}

void unpack(const at::Tensor& flat, const std::vector<at::Tensor>& tensors) {
  int64_t offset = 0;
  for (const at::Tensor& tensor : tensors) {
    tensor.copy_(flat.narrow(0, offset, tensor.numel()).view(tensor.sizes()));
    offset += tensor.numel();
  }
}

std::shared_ptr<ListCall> list_call(const Call& call, const std::vector<at::Tensor>& outputs,
                                    const std::vector<at::Tensor>& inputs, int rank, int world) {
  auto made = std::make_shared<ListCall>();
  made->tensors = outputs;
  made->tensors.insert(made->tensors.end(), inputs.begin(), inputs.end());
  const c10::ScalarType dtype = made->tensors.empty() ? at::kByte : made->tensors[0].scalar_type();
  for (const at::Tensor& tensor : made->tensors) {
    if (tensor.scalar_type() == dtype) continue;
    throw InvalidUsage(std::string(name(call.collective)) + ": tensors of " + c10::toString(dtype) + " and " +
                       c10::toString(tensor.scalar_type()) + " in one call");
  }
  Blocks& blocks = made->blocks;
  blocks.counts = chunk_counts(call.collective, outputs, inputs, rank, world);
  for (const at::Tensor& input : inputs) blocks.inputs.push_back(data_of(input));
  for (const at::Tensor& output : outputs) blocks.outputs.push_back(data_of(output));
  const auto [least, most] = std::minmax_element(blocks.counts.begin(), blocks.counts.end());
  blocks.longest = *most;
  blocks.uneven = *least != *most;
  made->call = call;
  made->call.dtype = dtype_of(made->tensors[0]);
  made->call.count = blocks.longest;
  made->call.blocks = &blocks;
  return made;
}

}  // namespace ringlet
