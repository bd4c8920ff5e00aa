// The message engine on the GPU: runs any schedule as groups of NCCL sends and receives and reduction kernels.
//
// Contract: run() enqueues one collective, exchange() messages, behind what is on the caller's stream, and what the
// caller enqueues there later comes after it; the host waits only while NCCL connects peers. All ranks make the same
// calls in the same order, one at a time: on another stream, which waits for the one before. Errors abort the
// communicator and throw; then so does every later call.
// A long message is cut into segments, the same piece of every chunk, for as long as something is to be reduced; they
// take turns, so that some are reduced while others travel. Scratch is allocated once, within the stated budget; a call
// allocates nothing on the device. Talks to the world through two tables only (gpu/nccl_api.h, cuda/device_library.h),
// which a test fills with its own. Ownership: api, device and communicator outlive it; tensors must stay until the
// stream has passed the call. The device must be current. Thread safety: one thread at a time.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "cuda/device_library.h"
#include "engine/call.h"
#include "engine/p2p.h"
#include "engine/selector.h"
#include "gpu/gpu_plan.h"
#include "gpu/nccl_communicator.h"

namespace ringlet {

/// "send to rank 1 (4000 bytes), recv from rank 2 (4000 bytes)"
std::string describe(const std::vector<Message>& messages);

class GpuMessageExecutor {
 public:
  struct Limits {
    size_t scratch_bytes = size_t{64} << 20;
    /// Of one chunk. Below twice the least a chunk is not cut, since each group costs NCCL and the device some 10 us.
    size_t least_segment_bytes = size_t{8} << 20, most_segment_bytes = size_t{32} << 20;
  };

  /// selector: what `auto` means; the same on all ranks.
  GpuMessageExecutor(NcclCommunicator& communicator, const RingletCudaDevice& device, const Limits& limits,
                     Selector selector = Selector());
  ~GpuMessageExecutor();
  GpuMessageExecutor(const GpuMessageExecutor&) = delete;
  GpuMessageExecutor& operator=(const GpuMessageExecutor&) = delete;

  /// Addresses are the device's. InvalidUsage, before anything moves, where the call or the budget does not do.
  void run(const Call& call, NcclStream stream);

  /// Point-to-point messages, together: none of them waits for another to be done. Between two ranks sends and receives
  /// meet in order. What they lack of being good calls is for the caller to see.
  void exchange(const std::vector<Message>& messages, std::chrono::milliseconds timeout, NcclStream stream);

  /// The call's, or what `auto` means for it. nccls_own: whether NCCL's own collective will do as well.
  const Algorithm& algorithm_for(const Call& call, bool nccls_own = false) const;

  /// "all_reduce #12 (ring, sum, float32, 1048576 elements)"
  const std::string& last_call() const { return last_; }

 private:
  static constexpr size_t kSets = 4;  // of scratch at most: segments under way at once
  struct Segment;
  struct Turn;
  struct Bound;

  RankInfo place(int root) const { return {rank_, world_, root}; }
  const GpuPlan& plan_for(const Algorithm& algorithm, const Call& call);
  Bound bind(const Call& call, const GpuPlan& plan, NcclStream stream) const;
  void cut(Bound& bound, size_t longest) const;
  void enqueue(const Bound& bound);
  void begin(const Bound& bound, const Segment& segment);
  void run_together(const Bound& bound, const std::vector<Turn>& turns);
  bool transfer(const Bound& bound, const std::vector<Turn>& turns);
  void combine(const Bound& bound, const Combine& one, const Segment& segment);
  void carry_input(const Bound& bound, int chunk, Home to, const Segment& segment);
  void move(const Bound& bound, const ReduceArgs& args, bool reduces);
  void catch_up(const Bound& bound);
  void mark_ready(const Bound& bound, const Segment& segment);
  void order(const Bound& bound, void* event, NcclStream before, NcclStream after);
  void release() noexcept;

  NcclCommunicator& communicator_;
  const Selector selector_;
  const RingletCudaDevice& device_;
  const Limits limits_;
  const int rank_;
  const int world_;
  std::byte* scratch_ = nullptr;
  NcclStream transfers_ = nullptr, computing_ = nullptr;  // where segments take turns
  void* moved_ = nullptr;                                 // the last group is through
  void* ready_[kSets] = {};                               // by set: what its next group sends is there
  bool fresh_[kSets] = {};                                // ... and transfers_ has not waited for it yet
  bool moving_ = false;                                   // there are groups that computing_ has not waited for
  void* entered_ = nullptr;                               // the caller's stream has come to the call in progress
  void* done_ = nullptr;                                  // the call in progress is done
  std::string last_;                                      // the last call, for messages
  std::unordered_map<uint64_t, std::unique_ptr<GpuPlan>> plans_;
  std::vector<const std::byte*> pointers_;  // of one combine's sources
};

}  // namespace ringlet
