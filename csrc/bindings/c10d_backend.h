// torch.distributed's backend "ringlet": c10d's virtuals on a Communicator.
//
// Contract: every call checks its tensors before anything moves. It then runs in the caller's thread (asyncOp false),
// or in issue order on any thread that is there (comm/call_queue.h); on GPU tensors, in the order of a stream. Calls
// read and write contiguous tensors of a list in place. Equal GPU tensors of a list are packed into one. Between
// startCoalescing and endCoalescing calls start as usual, but GPU messages start together at the end. The Work of
// endCoalescing covers all. endCoalescing throws the error of a call that could not start.
// Thread safety: as c10d requires: one thread issues calls, any thread waits.
#pragma once

#include <atomic>
#include <exception>
#include <functional>
#include <thread>
#include <utility>

#include "bindings/c10d_work.h"
#include "bindings/group_end.h"
#include "bindings/torch_store.h"
#include "bindings/torch_version.h"
#include "comm/communicator.h"
#include "comm/group_init.h"

namespace ringlet {

class C10dBackend final : public c10d::Backend {
 public:
  using Tensors = std::vector<at::Tensor>;
  using Lists = std::vector<Tensors>;
  using Splits = std::vector<int64_t>;
  using Handle = c10::intrusive_ptr<c10d::Work>;

  /// What init_process_group(pg_options=...) and new_group take.
  struct GroupOptions final : Options {
    explicit GroupOptions(std::string algorithm = "auto", std::string transport = "auto", int64_t max_ctas = 0)
        : Options("ringlet"), algorithm(std::move(algorithm)), transport(std::move(transport)), max_ctas(max_ctas) {}
    std::string algorithm;  ///< of all-reduces
    std::string transport;  ///< comm/group_init.h
    int64_t max_ctas;       ///< of a GPU (comm/communicator.h)
  };

  C10dBackend(c10::intrusive_ptr<c10d::Store> store, std::string name, std::unique_ptr<Communicator> group,
              Carrier carrier);

  const std::string getBackendName() const override { return "ringlet"; }
  c10::intrusive_ptr<Options> getBackendOptions() override;

  Handle broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  Handle allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  Handle allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  Handle allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override;
  Handle reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  Handle allgather(Lists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override;
  Handle _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override;
  Handle allgather_coalesced(Lists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override;
  Handle allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                         const c10d::AllgatherOptions& options) override;
  Handle gather(Lists& outputs, Tensors& inputs, const c10d::GatherOptions& options) override;
#if RINGLET_TORCH_HAS_GATHER_SINGLE
  Handle gather_single(at::Tensor& output, at::Tensor& input, const c10d::GatherOptions& options) override;
#endif
  Handle scatter(Tensors& outputs, Lists& inputs, const c10d::ScatterOptions& options) override;
  Handle reduce_scatter(Tensors& outputs, Lists& inputs, const c10d::ReduceScatterOptions& options) override;
  Handle _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                              const c10d::ReduceScatterOptions& options) override;
  Handle reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                         const c10d::ReduceScatterOptions& options) override;
  Handle alltoall_base(at::Tensor& output, at::Tensor& input, Splits& output_splits, Splits& input_splits,
                       const c10d::AllToAllOptions& options) override;
  Handle alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override;
  Handle send(Tensors& tensors, int peer, int tag) override;
  Handle recv(Tensors& tensors, int peer, int tag) override;
  Handle recvAnysource(Tensors& tensors, int tag) override;
  Handle barrier(const c10d::BarrierOptions& options) override;
  /// Names the ranks that do not come. Uses the store, so that it works if the group is stuck, and does not poison it.
  void monitoredBarrier(const c10d::BarrierOptions& options, bool wait_for_all) override;

  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override;
  Handle endCoalescing() override;

  /// Makes the GPU part of a group that is bound to a GPU (init_process_group(device_id=...)).
  void eagerConnectSingleDevice(at::Device device) override;
  bool supportsSplitting() const override { return true; }
  c10::intrusive_ptr<Backend> split(const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
                                    const c10::intrusive_ptr<Options>& options) override;

  void setTimeout(std::chrono::milliseconds timeout) override { group_->set_timeout(timeout); }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return group_->sequence(); }
  c10d::ErrorType getError() override;
  void abort() override { group_->abort("rank " + std::to_string(getRank()) + " aborted the group"); }
  /// Ends the calls of all ranks in this group, present and later ones, with InvalidUsage and `reason`.
  void fail(const std::string& reason) { group_->health().poison(InvalidUsage(reason)); }
  void shutdown() override { group_->close(std::chrono::seconds(2)); }

  at::Tensor allocateTensor(long size, at::TensorOptions options) override;
  bool supportsTensorAlloc(c10::DeviceIndex) override { return true; }
  std::shared_ptr<c10::Allocator> getMemAllocator() override;

  /// The all-reduce algorithm, by name; "auto" lets the selector choose.
  std::string algorithm() const { return algorithm_; }
  void set_algorithm(const std::string& name);
  void set_max_ctas(int64_t most) { group_->set_max_ctas(most); }

  const Communicator& group() const { return *group_; }

 private:
  struct Issue;
  Handle issue(Issue&& issue);
  Handle message(Tensors& tensors, int peer, bool sending, int tag);
  Handle part(const std::function<Handle()>& start);
  struct CoalescedMessage {
    Message message;
    at::Tensor tensor;
    c10::intrusive_ptr<C10dWork> handle;
  };
  void exchange(const std::vector<CoalescedMessage>& all);
  Handle remember(c10::intrusive_ptr<C10dWork> handle);
  std::exception_ptr drop_batch();
  bool collecting() const { return coalescer_.load() == std::this_thread::get_id(); }

  TorchStore store_;
  std::string name_;
  std::unique_ptr<Communicator, GroupEnd> group_;
  const Carrier carrier_;
  std::string algorithm_ = "auto";
  uint64_t monitored_ = 0;  // barriers
  uint64_t splits_ = 0;
  // The callback of a complete call may issue calls on another thread meanwhile: these are not part of the batch.
  std::atomic<std::thread::id> coalescer_{};
  std::vector<c10::intrusive_ptr<C10dWork>> coalescing_;  // the coalescer's, like what follows
  std::vector<CoalescedMessage> coalesced_messages_;      // of a GPU, not yet given
  std::exception_ptr refused_;                            // the first call of the batch that could not start
};

/// Joins the group of processes whose rendezvous in `store` has this `name`, which is new (ringlet/group_key.py).
c10::intrusive_ptr<C10dBackend> make_backend(const c10::intrusive_ptr<c10d::Store>& store, const std::string& name,
                                             const Member& member, Carrier carrier, std::chrono::milliseconds timeout);

/// Shuts down all backends before the interpreter ends: the callbacks of their calls need it.
void close_backends();

}  // namespace ringlet
