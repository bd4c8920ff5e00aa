#include "bindings/lists.h"

#include <algorithm>
#include <string>

#include "base/error.h"

namespace ringlet {
namespace {

/// In gather and scatter only the root sees the list. Blocks must be equal, because the other ranks cannot know more.
void check_equal(const std::vector<at::Tensor>& list, const at::Tensor& own, const char* call) {
  for (const at::Tensor& tensor : list) {
    if (tensor.numel() == own.numel()) continue;
    throw InvalidUsage(std::string(call) + ": all tensors must have the same number of elements, got " +
                       std::to_string(own.numel()) + " in this rank's tensor and " + std::to_string(tensor.numel()) +
                       " in the list: use all_to_all for uneven blocks");
  }
}

}  // namespace

const at::Tensor& only(const std::vector<at::Tensor>& tensors, const char* call) {
  if (tensors.size() != 1)
    throw InvalidUsage(std::string(call) + ": each rank must pass one tensor, got " + std::to_string(tensors.size()));
  return tensors[0];
}

void check_length(size_t length, int world, const char* call) {
  if (length == static_cast<size_t>(world)) return;
  throw InvalidUsage(std::string(call) + ": a list must have one entry for each of the " + std::to_string(world) +
                     " ranks, got " + std::to_string(length));
}

void refuse_none(const std::vector<at::Tensor>& tensors, const char* call) {
  if (tensors.empty()) throw InvalidUsage(std::string(call) + ": tensors must have at least one tensor, got none");
}

void check_pairs(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs, const char* call) {
  refuse_none(inputs, call);
  if (outputs.size() == inputs.size()) return;
  throw InvalidUsage(std::string(call) + ": each input must have one output, got " + std::to_string(inputs.size()) +
                     " inputs and " + std::to_string(outputs.size()) + " outputs");
}

std::vector<size_t> counts_of(const std::vector<at::Tensor>& list) {
  std::vector<size_t> counts;
  for (const at::Tensor& tensor : list) counts.push_back(static_cast<size_t>(tensor.numel()));
  return counts;
}

void check_own(const at::Tensor& own, const at::Tensor& in_list, int rank, const char* call) {
  if (own.numel() == in_list.numel()) return;
  throw InvalidUsage(std::string(call) + ": this rank's tensor must have as many elements as tensor " +
                     std::to_string(rank) + " of the list (" + std::to_string(in_list.numel()) + "), got " +
                     std::to_string(own.numel()));
}

std::vector<size_t> chunk_counts(Collective collective, const std::vector<at::Tensor>& outputs,
                                 const std::vector<at::Tensor>& inputs, int rank, int world) {
  const char* call = name(collective);
  if (collective == Collective::all_to_all) {
    check_length(inputs.size(), world, call);
    check_length(outputs.size(), world, call);
    std::vector<size_t> counts = counts_of(inputs);
    const std::vector<size_t> received = counts_of(outputs);
    counts.insert(counts.end(), received.begin(), received.end());
    return counts;
  }
  const bool gathers = collective == Collective::all_gather || collective == Collective::gather;
  if (!gathers && collective != Collective::reduce_scatter && collective != Collective::scatter) {
    throw InvalidUsage(std::string(call) + ": input and output must be tensors, got a list");
  }
  const std::vector<at::Tensor>& list = gathers ? outputs : inputs;
  const at::Tensor& own = only(gathers ? inputs : outputs, call);
  check_length(list.size(), world, call);
  if (collective == Collective::gather || collective == Collective::scatter) {
    check_equal(list, own, call);
  } else {
    check_own(own, list[static_cast<size_t>(rank)], rank, call);
  }
  return counts_of(list);
}

}  // namespace ringlet
