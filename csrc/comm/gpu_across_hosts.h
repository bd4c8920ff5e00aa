// Collectives of GPUs on several hosts, each with as many ranks: peers' memory inside hosts, NCCL between them.
//
//   2 hosts of 2 ranks    all-reduce   in       every rank of a host sums its shard          a kernel on peers' memory
//                                      across   equal shards of all hosts are summed         NCCL
//                                      out      every rank of a host gets all shards         a kernel on peers' memory
//                         broadcast    across   the root's data go to one rank of each host; out: to all of its ranks
//
// Sums: inside a host in rank order, rounded once; then NCCL's or a schedule's order. An average is divided after that.
// With a shard goes whether a kernel gave up: others' then end too, rather than take a shard that is not one.
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

  /// What is the same on all ranks decides.
  static bool serves(const Call& call) noexcept;

  void run(const Call& call, void* stream);
  const std::string& last_call() const { return last_; }

  void check() { communicator_->check(); }
  void abort(ErrorKind kind, const std::string& reason) noexcept { communicator_->abort(kind, reason); }

 private:
  void all_reduce(const Call& call, void* stream);
  void broadcast(const Call& call, void* stream);
  void sum_across(const Call& call, void* stream);
  void divide(std::byte* values, const Call& call, void* stream);

  GpuPullExecutor& inside_;
  const RingletCudaDevice& device_;
  const Topology topology_;
  const int rank_;
  std::unique_ptr<NcclCommunicator> communicator_;
  GpuMessageExecutor messages_;
  NcclCollectives collectives_;
  std::string last_;
};

}  // namespace ringlet
