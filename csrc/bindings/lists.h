// Lists with one tensor for each rank, instead of one tensor with a block for each rank. If all ranks can know the
// sizes, the tensors may have different sizes.
//
// Contract: all_gather takes a list of outputs, reduce_scatter a list of inputs, all_to_all both. In gather and scatter
// only the root sees the list, so its tensors must have equal sizes. Thread safety: pure.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "engine/call.h"

namespace ringlet {

/// The only tensor of a list; InvalidUsage if the list has another length.
const at::Tensor& only(const std::vector<at::Tensor>& tensors, const char* call);
/// Refuse a list that does not have one entry for each rank, and calls with more outputs than inputs, or fewer.
void check_length(size_t length, int world, const char* call);
void refuse_none(const std::vector<at::Tensor>& tensors, const char* call);
void check_pairs(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs, const char* call);

std::vector<size_t> counts_of(const std::vector<at::Tensor>& list);

/// Refuses a tensor of this rank that is not as long as this rank's entry of the list.
void check_own(const at::Tensor& own, const at::Tensor& in_list, int rank, const char* call);

/// The elements of each chunk of the schedule, on a rank that sees the list. Throws InvalidUsage if the collective does
/// not take such tensors.
std::vector<size_t> chunk_counts(Collective collective, const std::vector<at::Tensor>& outputs,
                                 const std::vector<at::Tensor>& inputs, int rank, int world);

}  // namespace ringlet
