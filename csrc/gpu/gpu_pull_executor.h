// Runs pull plans (engine/pull/pull_plan.h) and all-to-alls on the GPU: one kernel per rank, which reads peers' memory itself.
//
// Contract: run() enqueues one collective on the caller's stream and returns; all ranks make the same calls in the same
// order, one at a time (what they call is compared), and every rank's kernel must get to run beside its peers': with
// several ranks on one device, all blocks together must fit on it. check(), of a call that the stream has passed,
// throws Timeout if a wait took longer than nine tenths of the call's timeout, InvalidUsage if a peer called something
// else; the engine is of no use then, and kernels launched later end at once. Tensors are staged, but where those of
// all ranks are in their heaps. Peers' memory is addresses only, of one process, of CUDA IPC or of a mapping.
// Ownership: regions and device outlive it; a region is zeroed once before any rank's first call. Tensors must stay
// until the stream has passed the call, and where they are read in place, all ranks' streams.
// Thread safety: one thread at a time, but check() and abort(), which come from any thread while another is in run(). The
// device must be current in the constructor and run().
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/error.h"
#include "cuda/all_to_all.h"
#include "cuda/device_library.h"
#include "cuda/low_latency.h"
#include "cuda/pull.h"
#include "engine/call_layout.h"
#include "engine/failure.h"
#include "engine/pull/pull_plan.h"
#include "engine/selector.h"
#include "gpu/copy_stream.h"

namespace ringlet {

/// A wait in a kernel was too long. Names the call, and which rank waited for which.
struct KernelTimeout final : Timeout {
  using Timeout::Timeout;
};

class GpuPullExecutor {
 public:
  struct Setup {
    int rank = 0;
    int world = 1;
    std::vector<std::byte*> regions{};  ///< by rank, as this rank's device reaches them; 128-byte aligned
    size_t region_bytes = 0;            ///< the same on all ranks
    int blocks = 16;                    ///< of a kernel at most; the same on all ranks
    std::vector<std::byte*> heaps{};    ///< by rank, where tensors can be read in place; empty: nowhere
    size_t heap_bytes = 0;              ///< of this rank's own
    Selector selector{};                ///< what `auto` means; the same on all ranks
    bool low_latency = false;  ///< small all-reduces by cuda/low_latency.h, where one_shot is meant; all ranks alike
  };

  GpuPullExecutor(const RingletCudaDevice& device, Setup setup);
  ~GpuPullExecutor();
  GpuPullExecutor(const GpuPullExecutor&) = delete;
  GpuPullExecutor& operator=(const GpuPullExecutor&) = delete;

  /// Whether the call is an all-to-all whose blocks may lie apart and differ in length; no rank need know those between
  /// two others. Not one by another algorithm than pairwise.
  static bool exchanges(const Call& call) noexcept;

  void run(const Call& call, void* stream);

  /// Throws what ended a call that the stream has passed; `what` is the first that is not done. Where all is well it makes
  /// no call to the device.
  void check(const std::string& what) const;

  /// Ends the kernels that wait and all later ones, within microseconds; check() and run() throw the reason.
  void abort(ErrorKind kind, const std::string& reason) noexcept;

  /// "all_reduce #12 (ring, sum, float32, 1048576 elements)"
  const std::string& last_call() const { return last_; }

 private:
  /// A plan with its copy on the device.
  struct Uploaded {
    PullPlan plan;
    cuda::PullProgram program{};
    bool ends_in_place = true;  // the staged plan's algorithm
  };

  const Uploaded& plan_for(const Algorithm& algorithm, int root, bool in_place);
  void run_plan(const Call& call, void* stream);
  void exchange(const Call& call, void* stream);
  Call with_algorithm(const Call& call) const;
  cuda::LowLayout low_layout() const;
  bool is_low_latency(const Call& call) const;
  void run_low_latency(const Call& call, void* stream);
  void lay_blocks(const Call& call, cuda::ExchangeArgs& args) const;
  void fill(const Call& call, cuda::PullRanks& ranks) const;
  bool inside_heap(const std::byte* tensor, size_t bytes) const;
  bool in_heap(const Call& call) const;
  void clear_flags() const;
  void reserve(size_t bytes);
  const std::byte* upload(const void* data, size_t bytes);
  void cut(const PullPlan& plan, const Call& call, cuda::PullArgs& args, cuda::PullProgram& program) const;
  void place(const CallLayout& layout, bool in_heap, cuda::PullArgs& args) const;
  std::string this_rank() const;
  cuda::PullCall told_call(int rank, int block, bool low) const;
  [[noreturn]] void refuse_other_call(const std::string& what, int peer, int block, uint32_t expected) const;
  cuda::PullLayout layout() const;
  void read(void* to, size_t offset, size_t bytes) const;

  const RingletCudaDevice& device_;
  const Setup setup_;
  const CopyStream copies_;
  std::string last_;  // the last call, for messages
  Failure failure_;
  std::unordered_map<uint64_t, std::unique_ptr<Uploaded>> plans_;
  cuda::PullHost* host_ = nullptr;  // kernels write it too
  std::vector<void*> owned_;        // on the device: plans
  std::byte* free_ = nullptr;       // of the last of these, from here on ...
  size_t room_ = 0;                 // ... so many bytes
};

}  // namespace ringlet
