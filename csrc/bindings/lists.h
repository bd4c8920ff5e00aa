// Lists of tensors, one for each rank, in place of one tensor with a block for each: of different sizes, where all
// ranks can know them.
//
// Contract: all_gather takes a list of outputs, reduce_scatter of inputs, all_to_all both. Gather and scatter, of which
// only the root sees the list, take one of equal sizes. Thread safety: pure.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "engine/call.h"

namespace ringlet {

/// The only tensor of a list; InvalidUsage if the list has another length.
const at::Tensor& only(const std::vector<at::Tensor>& tensors, const char* call);
/// Refuse a list that does not have one entry for each rank, and calls with more outputs than inputs, or fewer.
void check_length(size_t length, int world, const char* call);
void check_pairs(size_t outputs, size_t inputs, const char* call);

std::vector<size_t> counts_of(const std::vector<at::Tensor>& list);

/// Refuses a tensor of this rank that is not as long as this rank's entry of the list.
void check_own(const at::Tensor& own, const at::Tensor& in_list, int rank, const char* call);

/// Elements by the schedule's chunk, of a rank that sees the list. Throws InvalidUsage where the tensors are not what
/// the collective takes.
std::vector<size_t> chunk_counts(Collective collective, const std::vector<at::Tensor>& outputs,
                                 const std::vector<at::Tensor>& inputs, int rank, int world);

/// Their elements one after the other in one tensor: a copy where there are several, or room where they are `received`.
at::Tensor packed(const std::vector<at::Tensor>& tensors, bool received);
void unpack(const at::Tensor& flat, const std::vector<at::Tensor>& tensors);

/// A call with all that its pointers lead to.
struct ListCall {
  Call call;
  Blocks blocks;
  std::vector<at::Tensor> tensors;  // outputs, then inputs
};

/// `call` on lists, of contiguous tensors of one dtype; InvalidUsage for others.
std::shared_ptr<ListCall> list_call(const Call& call, const std::vector<at::Tensor>& outputs,
                                    const std::vector<at::Tensor>& inputs, int rank, int world);

}  // namespace ringlet
