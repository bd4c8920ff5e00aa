// Virtual ranks of the message engine: one process, a thread and a stream each, all on device 0, their NCCL driven
// together.
//
// Contract: run() makes one call on all ranks, each on its own thread, and returns what was wrong, "" where nothing
// was. After a failure, start()'s too, the world is of no use: end_failed() aborts what is under way.
// Ownership: owns everything of its ranks; goes by drop() (section.h), since threads that do not come back use it
// still.
// Thread safety: one thread at a time.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "gpu/gpu_message_executor.h"
#include "gpu/nccl_collectives.h"
#include "nccl_together.h"
#include "rank_tensors.h"
#include "rank_thread.h"

namespace gpu_check {

class MessageWorld {
 public:
  struct Rank {
    RankTensors tensors;
    Call call;
    Stream stream;
    std::unique_ptr<NcclCommunicator> communicator;
    std::unique_ptr<GpuMessageExecutor> engine;
    std::unique_ptr<NcclCollectives> nccls_own;
    RankThread thread;
  };

  MessageWorld(int world, const Options& options);
  /// Makes the communicators and connects all pairs.
  void start(const GpuMessageExecutor::Limits& limits);

  std::string run(const Case& c, const Expectation& expectation);

  /// In parts, for a program that makes the same call again and again.
  void place(const Case& c, const Expectation& expectation);
  std::string launch(int times);
  /// NCCL's own all-reduce, on the same communicators: each further one would take hardware queues, of which there
  /// are 32.
  std::string launch_nccls_own(int times);
  std::string wait();
  std::string difference(const Expectation& expectation);
  /// So many groups on all ranks, of a byte to the next: what handing them over and NCCL's launches cost.
  std::string hand_over(int times);

  std::vector<std::unique_ptr<Rank>>& ranks() { return ranks_; }

  void end_failed();

 private:
  std::string on_all(const std::function<void(Rank&, int)>& act);
  std::string in_call(const std::function<void(Rank&, int)>& act);
  void join(int rank, const NcclUniqueId& id, const GpuMessageExecutor::Limits& limits);
  std::string connect();

  const std::chrono::seconds timeout_;
  NcclTogether together_;
  Memory connecting_;  // a byte to each rank and one from each, for every rank
  std::vector<std::unique_ptr<Rank>> ranks_;
};

}  // namespace gpu_check
