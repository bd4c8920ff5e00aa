// One rank's NCCL communicator, whose calls a thread of its own makes, so that none waits for ever.
//
// Contract: send and recv between open_group and close_group are collected; close_group enqueues them on their streams
// as one NCCL group and returns when NCCL has taken it, which the first time connects the peers. call() does the same
// for any other function of NCCL. A call that NCCL refuses, a peer's failure and a passed deadline abort the
// communicator and throw (DeviceError, PeerLost, Timeout); it is of no use then, and every later call throws the same.
// The communicator is a blocking one: for each group of a nonblocking one NCCL starts a thread, in 30 to 60 us.
// Ownership: owns the ncclComm_t; buffers must stay until the stream has passed the group.
// Thread safety: one thread at a time; check() and abort() from any thread, also while another waits in a call.
#pragma once

#include <chrono>
#include <cstddef>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "base/error.h"
#include "engine/failure.h"
#include "gpu/launch_thread.h"
#include "gpu/nccl_api.h"

namespace ringlet {

class NcclCommunicator {
 public:
  struct Setup {
    NcclUniqueId id{};  ///< the same on all ranks: make_id() of one of them
    int rank = 0;
    int world = 1;
    int max_ctas = INT_MIN;         ///< at most so many processors for its kernels; NCCL's choice if not given
    std::function<void()> look{};   ///< asked now and then while a call waits; what it throws ends that
    std::function<void()> enter{};  ///< what another thread does first that makes calls for this rank: takes its device
  };
  using Act = std::function<int(const NcclApi& api, NcclComm comm)>;

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

  /// `act` calls the function of NCCL whose name is given, and holds all that it uses.
  void call(const char* function, Act act, const Deadline& deadline);

  /// Throws where something enqueued before has failed since.
  void check();

  /// Ends what is under way here. All ranks must, or those that wait for this one wait for their own deadlines. The
  /// thread that makes the calls does it: NCCL frees the communicator, which a call that is inside still uses. So if a
  /// call does not return, or NCCL waits for CUDA graphs that hold its calls, or for peers, the communicator stays until
  /// that is over; after a second nobody waits for that any more, and the log says so.
  /// `reason`: what later calls throw unless something failed before.
  void abort(ErrorKind kind = ErrorKind::device_error,
             const std::string& reason = "the communicator was aborted before") noexcept;

 private:
  /// What a thread that is left alone may still use.
  struct Held {
    const NcclApi api;
    NcclComm comm = nullptr;  // NCCL writes it
  };
  struct Part {
    bool sends;
    void* address;
    size_t bytes;
    int peer;
    NcclStream stream;
  };

  void take(int result, const char* function);
  void launch(const char* function, const std::function<int()>& act, const Deadline& deadline);
  bool poll();
  bool leave();
  void end(int (*NcclApi::*how)(NcclComm)) noexcept;
  std::string last_error();
  [[noreturn]] void fail(ErrorKind kind, const std::string& message);

  const std::shared_ptr<Held> held_;
  const int rank_;
  const int world_;
  const std::function<void()> look_;
  Failure failure_;
  std::exception_ptr looked_;  // what look_ threw
  std::vector<Part> parts_;    // of the open group
  std::mutex mutex_;           // held in questions to NCCL, so that none comes after an abort
  bool gone_ = false;          // aborted, or at its end; guarded by mutex_
  LaunchThread thread_;
};

}  // namespace ringlet
