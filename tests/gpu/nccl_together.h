// NCCL for ranks that are threads of one process on one device, which NCCL allows only if one thread makes all ranks'
// calls in one group: behind a table of the same functions each rank has a thread of its own, and one driver makes the
// calls.
//
// Contract: api() is for rank threads. A group that a rank ends is handed over; when every rank that is inside a call
// has handed one over or left, the driver puts all of them into one of NCCL's and gives all its result. An all-reduce
// outside a group is one; it is the only collective of NCCL's that ranks may call. Rounds in which
// a rank moves nothing it skips, so the groups put together may be of different rounds: all pairs must be connected
// first, by a group in which each rank sends to and receives from every other. enter() comes before the ranks' calls,
// leave() from each at its end. Ranks that do not come in time are given up: those that came get ncclRemoteError.
// Ownership: ends the communicators that were made through it, at its own end; aborts them where one was aborted.
// Thread safety: any thread; one NcclTogether at a time makes communicators.
#pragma once

#include <functional>
#include <memory>

#include "gpu/nccl_api.h"

namespace gpu_check {

class NcclTogether {
 public:
  /// `begin`: what the driver's thread does first.
  NcclTogether(const ringlet::NcclApi& real, int world, std::function<void()> begin);
  ~NcclTogether();
  NcclTogether(const NcclTogether&) = delete;
  NcclTogether& operator=(const NcclTogether&) = delete;

  const ringlet::NcclApi& api() const { return api_; }

  /// All ranks are about to make calls. Not while any is inside.
  void enter();
  /// The thread's rank makes no more for now.
  void leave();
  /// Ends all ranks' kernels. False where NCCL does not come back from it.
  bool abort_all();

  struct State;

 private:
  ringlet::NcclApi api_;
  std::shared_ptr<State> state_;
};

}  // namespace gpu_check
