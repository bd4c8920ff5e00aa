// Collectives of GPUs on several hosts, each with as many ranks: peers' memory inside hosts, NCCL between them.
//
//   all_reduce          in: each rank of a host sums its shard. across: equal shards are summed. out: all get all
//   reduce, gather      in: to the rank of each host that has the root's index. across: from these to the root
//   broadcast, scatter  across: from the root to the rank of each host that has its index. out: to the host's ranks
//   reduce_scatter      in, a kernel for each host: its ranks' blocks are summed. across: equal blocks are summed
//   all_gather          across: each rank gets the blocks of its index. out, a kernel for each host: its blocks to all
//
// Sums: inside a host in rank order, rounded once; then NCCL's or a schedule's order. An average is divided after that.
// With what goes across goes whether a kernel gave up: others' then end too, rather than take a sum that is not one.
// Contract: as GpuPullExecutor; but only ranks of one host compare what they call. Errors end the communicator and
// throw. Ownership: the pull executor and the device outlive it. Thread safety: as there.
#pragma once

#include <memory>
#include <string>

#include "gpu/gpu_message_executor.h"
#include "gpu/gpu_pull_executor.h"
#include "gpu/nccl_collectives.h"
#include "schedule/topology.h"

namespace ringlet {

class GpuAcrossHosts {
 public:
  /// inside: of this rank's host, by index there. across: of the ranks with this rank's index, by host.
  GpuAcrossHosts(GpuPullExecutor& inside, std::unique_ptr<NcclCommunicator> across, const RingletCudaDevice& device,
                 const Selector& selector, const Topology& topology, int rank);
  ~GpuAcrossHosts();
  GpuAcrossHosts(const GpuAcrossHosts&) = delete;
  GpuAcrossHosts& operator=(const GpuAcrossHosts&) = delete;

  /// What is the same on all ranks decides. Not blocks of ranks, if those of a host do not follow each other; and not
  /// what has no room in scratch.
  bool serves(const Call& call) const noexcept;

  /// What it does not serve of collectives of up to so many bytes; "" or "; ..."
  std::string limits(size_t bytes) const;

  void run(const Call& call, void* stream);
  const std::string& last_call() const { return last_; }

  void check() { communicator_->check(); }
  void abort(ErrorKind kind, const std::string& reason) noexcept { communicator_->abort(kind, reason); }

 private:
  void check_call(const Call& call) const;
  void all_reduce(const Call& call, void* stream);
  void broadcast(const Call& call, void* stream);
  void reduce(const Call& call, void* stream);
  void reduce_scatter(const Call& call, void* stream);
  void all_gather(const Call& call, void* stream);
  void gather(const Call& call, void* stream);
  void scatter(const Call& call, void* stream);
  Call inside(const Call& call) const;
  bool leads(const Call& call) const;
  std::byte* of_host(const std::byte* buffer, int host, const Call& call) const;
  void sum_across(const Call& call, void* stream);
  void move_across(const Call& call, const std::byte* whole, void* stream);
  NcclCommunicator::Act word(void* stream) const;
  void divide(std::byte* values, const Call& call, void* stream) const;

  GpuPullExecutor& inside_;
  const RingletCudaDevice& device_;
  const Topology topology_;
  const int rank_, host_, index_;
  const int ranks_;               // of each host
  bool adjacent_ = true;          // ranks of a host follow each other
  std::byte* scratch_ = nullptr;  // a call's, and this rank's word after that
  std::unique_ptr<NcclCommunicator> communicator_;
  GpuMessageExecutor messages_;
  NcclCollectives collectives_;
  std::string last_;
};

}  // namespace ringlet
