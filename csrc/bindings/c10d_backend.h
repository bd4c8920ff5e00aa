// torch.distributed's backend "ringlet": c10d's virtuals on a Communicator.
//
// Contract: every call checks its tensors, then runs in the caller's thread (asyncOp false) or in issue order on the
// group's progress thread. Lists of tensors go through one flat registered tensor.
// Thread safety: as c10d demands: one thread issues calls, any waits.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "bindings/c10d_work.h"
#include "comm/communicator.h"

namespace ringlet {

class C10dBackend final : public c10d::Backend {
 public:
  using Tensors = std::vector<at::Tensor>;
  using Lists = std::vector<Tensors>;
  using Handle = c10::intrusive_ptr<c10d::Work>;

  C10dBackend(int rank, int size, std::unique_ptr<Communicator> group);
  ~C10dBackend() override;

  const std::string getBackendName() const override { return "ringlet"; }

  Handle broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  Handle allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  Handle allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override;
  Handle reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  Handle allgather(Lists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override;
  Handle _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override;
  Handle gather(Lists& outputs, Tensors& inputs, const c10d::GatherOptions& options) override;
  Handle scatter(Tensors& outputs, Lists& inputs, const c10d::ScatterOptions& options) override;
  Handle reduce_scatter(Tensors& outputs, Lists& inputs, const c10d::ReduceScatterOptions& options) override;
  Handle _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                              const c10d::ReduceScatterOptions& options) override;
  Handle alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                       std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& options) override;
  Handle send(Tensors& tensors, int peer, int tag) override;
  Handle recv(Tensors& tensors, int peer, int tag) override;
  Handle barrier(const c10d::BarrierOptions& options) override;

  void setTimeout(std::chrono::milliseconds timeout) override { group_->set_timeout(timeout); }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return group_->sequence(); }
  void abort() override { group_->abort("rank " + std::to_string(getRank()) + " aborted the group"); }
  void shutdown() override { group_->close(std::chrono::seconds(2)); }

  at::Tensor allocateTensor(long size, at::TensorOptions options) override;
  bool supportsTensorAlloc(c10::DeviceIndex) override { return true; }

  /// The all-reduce algorithm, by name; "auto" lets the selector choose.
  std::string algorithm() const { return algorithm_; }
  void set_algorithm(const std::string& name);

 private:
  struct Issue;
  Handle issue(Issue issue);

  std::unique_ptr<Communicator> group_;
  std::string algorithm_ = "auto";
};

}  // namespace ringlet
