// One rank's NCCL communicator, used for sends and receives in groups, none of which waits for ever.
//
// Contract: open_group, send and recv, close_group enqueue on a stream and return when NCCL has taken the group, which
// the first time connects the peers. A call that NCCL refuses, a peer's failure and a passed deadline abort the
// communicator and throw (DeviceError, PeerLost, Timeout); it is of no use then, and every later call throws the same.
// Ownership: owns the ncclComm_t; `api` outlives it. Buffers must stay until the stream has passed the group.
// Thread safety: one thread at a time, and the same between open_group and close_group.
#pragma once

#include <chrono>
#include <cstddef>
#include <functional>
#include <string>

#include "base/deadline.h"
#include "base/error.h"
#include "gpu/nccl_api.h"

namespace ringlet {

class NcclCommunicator {
 public:
  struct Setup {
    NcclUniqueId id{};  ///< the same on all ranks: make_id() of one of them
    int rank = 0;
    int world = 1;
    int max_ctas = INT_MIN;         ///< at most so many processors for its kernels; NCCL's choice if not given
    std::function<void()> look{};   ///< asked now and then while NCCL connects; what it throws ends that
    std::function<void()> enter{};  ///< what another thread does first that makes calls for this rank: takes its device
  };

  static NcclUniqueId make_id(const NcclApi& api);

  /// Collective: returns when all ranks have come. The rank's device must be current.
  NcclCommunicator(const NcclApi& api, const Setup& setup, const Deadline& deadline);
  ~NcclCommunicator();
  NcclCommunicator(const NcclCommunicator&) = delete;
  NcclCommunicator& operator=(const NcclCommunicator&) = delete;

  int rank() const { return rank_; }
  int world() const { return world_; }

  void open_group();
  void send(const void* from, size_t bytes, int peer, NcclStream stream);
  void recv(void* to, size_t bytes, int peer, NcclStream stream);
  void close_group(const Deadline& deadline);

  /// Throws where something enqueued before has failed since.
  void check();

  /// Ends what is under way here. All ranks must, or those that wait for this one wait for their own deadlines. NCCL
  /// waits in it for CUDA graphs that hold its calls, and for peers: after a second it goes on doing so on a thread of
  /// its own.
  void abort() noexcept;
  /// The same for a reason, which later calls throw unless something failed before.
  void abort(ErrorKind kind, const std::string& reason) noexcept;

 private:
  void take(int result, const char* function);
  void settle(const char* function, const Deadline& deadline);
  void look();
  [[noreturn]] void fail(ErrorKind kind, const std::string& message);

  const NcclApi& api_;
  NcclComm comm_ = nullptr;
  int rank_;
  int world_;
  const std::function<void()> look_, enter_;
  bool in_group_ = false;
  ErrorKind failed_kind_ = ErrorKind::device_error;
  std::string failed_;  // empty while all is well
};

}  // namespace ringlet
