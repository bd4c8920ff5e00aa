// What a group's calls on GPUs run on: peers' memory, NCCL, or both, as all ranks found together.
//
// Contract: the constructor is a collective of the host's group: each rank tells what it lacks, then what it could not
// make. What any rank lacks none uses; where nothing is left all throw the same DeviceError, which names ranks and
// reasons. Collectives go as the group's table says, or those of up to Parts::peer_bytes through peers' memory, longer
// ones, messages and blocks of different sizes through NCCL, by its own collectives or by schedules. Where there is
// only one of the two it serves what it can, and the rest is InvalidUsage; so is a group whose ranks are on several
// hosts, before any rank waits for another. check(), after work was found finished, throws what has ended it. Calls are
// one at a time, in one order on all ranks. Ownership: the host's group outlives it. Thread safety: one thread at a
// time, but check() and abort(), which come from another one while that waits in a call; the device must be current in
// the constructor, run() and exchange().
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "gpu/gpu_message_executor.h"
#include "gpu/gpu_pull_executor.h"
#include "gpu/host_group.h"
#include "gpu/nccl_collectives.h"
#include "gpu/peer_memory.h"

namespace ringlet {

class GpuExecutors {
 public:
  static constexpr size_t kPeerBytes = size_t{1} << 20;

  /// What this rank has.
  struct Parts {
    const RingletCudaDevice* device = nullptr;
    int number = 0;  ///< of the device, in this process
    const NcclApi* nccl = nullptr;
    size_t peer_bytes = kPeerBytes;  ///< RINGLET_PEER_MEMORY_BYTES; 0: peers' memory is not used; equal on all ranks
    int by_table = 0;                ///< 1: that is not set, and the table may say otherwise
    int max_ctas = 0;  ///< processors at most for NCCL's kernels, and blocks for a pull kernel; 0: no limit; equal, too
    std::string no_device{};  ///< why not
    std::string no_nccl{};
  };
  static Parts find(int number);

  GpuExecutors(HostGroup& host, const Parts& parts);
  ~GpuExecutors();
  GpuExecutors(const GpuExecutors&) = delete;
  GpuExecutors& operator=(const GpuExecutors&) = delete;

  const RingletCudaDevice& device() const { return *parts_.device; }
  int number() const { return parts_.number; }
  /// Whether another rank is a thread of this process with the same device, which has one default stream for both.
  bool shares_default_stream() const { return memory_ && memory_->shares_device(); }

  void run(const Call& call, void* stream);
  void exchange(const std::vector<Message>& messages, std::chrono::milliseconds timeout, void* stream);

  /// What the last call was, for messages.
  const std::string& last_call() const { return *last_; }

  /// Throws what has ended the calls; `what` is the first that is not done.
  void check(const std::string& what);
  void abort(ErrorKind kind, const std::string& reason) noexcept;

  /// "peer memory up to 1048576 bytes, NCCL 2.28.9 beyond".
  std::string describe() const;

 private:
  struct Offer;

  Offer lay_out(const Parts& parts);
  void refuse_threads_on_a_gpu(std::vector<Offer>& all, Offer& mine) const;
  void warn_of_one_gpu(const std::vector<Offer>& all) const;
  void make(const std::vector<Offer>& all, Offer& mine);
  std::unique_ptr<NcclCommunicator> meet(const NcclUniqueId& id);
  void reach_peers(const std::vector<Offer>& all);
  std::vector<Offer> exchange(const Offer& mine);
  static std::string difference(const std::vector<Offer>& all);
  void drop(const std::vector<Offer>& all);
  bool through_peers(const Call& call) const;
  void run_through_nccl(const Call& call, void* stream);

  HostGroup& host_;
  const Parts parts_;
  std::unique_ptr<NcclCommunicator> communicator_;
  std::unique_ptr<GpuMessageExecutor> message_;
  std::optional<NcclCollectives> collectives_;
  std::unique_ptr<PeerMemory> memory_;
  std::unique_ptr<GpuPullExecutor> pull_;
  std::string no_nccl_, no_peers_;  // why not, where not
  const std::string* last_ = nullptr;
  bool made_ = false;  // from then on calls are made under the group's lock, where nothing of the program's may run
};

}  // namespace ringlet
