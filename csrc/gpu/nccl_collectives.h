// NCCL's own collectives, for calls whose algorithm is "nccl" (schedule/registry.h).
//
// Contract: run() enqueues one collective behind what is on the stream; all ranks make the same calls in the same order,
// one at a time. serves() looks at what is the same on all ranks. NCCL chooses algorithm and order of summation, and may
// round a sum of 16-bit floats at every hop (docs/numerics.md). An error aborts the communicator and throws.
// Ownership: the communicator outlives it; tensors must stay until the stream has passed the call.
// Thread safety: one thread at a time.
#pragma once

#include <string>

#include "engine/call.h"
#include "gpu/nccl_communicator.h"

namespace ringlet {

class NcclCollectives {
 public:
  explicit NcclCollectives(NcclCommunicator& communicator) : communicator_(communicator) {}

  /// Not blocks that lie apart, dtypes and operations that NCCL lacks, and min and max of floats, in which NCCL loses
  /// NaNs.
  static bool serves(const Call& call) noexcept;

  /// InvalidUsage for a call that it does not serve.
  void run(const Call& call, NcclStream stream);

  const std::string& last_call() const { return last_; }

 private:
  NcclCommunicator& communicator_;
  std::string last_;
};

}  // namespace ringlet
