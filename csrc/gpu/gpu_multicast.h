// Sums of all ranks by multicast memory (cuda/multicast.h): all-reduces of float32, float16 and bfloat16.
//
// Contract: as GpuPullExecutor, whose meetings, failures and order of calls these calls share: check() and abort() are
// its own. The order of a sum is not promised, so a call that names an algorithm is not served; ranks of which one
// names one are InvalidUsage. Tensors are staged. Ownership: the executor and the memory outlive it. Thread safety: as
// there. This has never run on a GPU.
#pragma once

#include <cstddef>

#include "gpu/gpu_pull_executor.h"

namespace ringlet {

class GpuMulticast {
 public:
  struct Memory {
    std::byte* all;  ///< the multicast object, as this rank's device reaches it
    std::byte* own;  ///< this rank's memory that is bound to it
    size_t bytes;    ///< of each; the same on all ranks
  };

  GpuMulticast(const RingletCudaDevice& device, GpuPullExecutor& inside, const Memory& memory)
      : device_(device), inside_(inside), memory_(memory) {}

  /// The same on all ranks. Not what is small enough for the kernel whose words carry flags.
  bool serves(const Call& call) const;
  void run(const Call& call, void* stream);

 private:
  const RingletCudaDevice& device_;
  GpuPullExecutor& inside_;
  const Memory memory_;
};

}  // namespace ringlet
