// Virtual ranks of the message engine: one process, a stream each, all on device 0. NCCL serves ranks that share a device
// only if one thread makes all ranks' calls in one group. So the engines work on tables of functions that only write down
// what they are to do (record()), and then one thread does it (play()): what is a stream's as it comes, and all ranks'
// next groups as one.
//
// Contract: run() makes one call on all ranks and returns what was wrong, "" where nothing was, or throws. Rounds in which
// a rank moves nothing it skips, so groups put together may be of different rounds: the constructor connects all pairs by
// one group. After a failure the world is of no use: end_failed() aborts what is under way.
// Ownership: owns everything of its ranks; goes by drop() (section.h), since what does not come back uses it still.
// Thread safety: one thread at a time; one world at a time.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "gpu/gpu_message_executor.h"
#include "nccl_ranks.h"
#include "rank_tensors.h"

namespace gpu_check {

class MessageWorld {
 public:
  /// What a rank does next: `act`, or a group of NCCL's.
  struct Step {
    std::function<int()> act{};
    std::vector<std::function<int(const NcclApi&)>> group{};
  };
  struct Rank {
    RankTensors tensors;
    Call call;
    Stream stream;
    std::unique_ptr<NcclCommunicator> communicator;
    std::unique_ptr<GpuMessageExecutor> engine;
    std::vector<Step> steps;
  };

  MessageWorld(int world, const Options& options, const GpuMessageExecutor::Limits& limits);

  std::string run(const Case& c, const Expectation& expectation);

  /// In parts, for a program that makes the same call again and again. What was recorded may be played any time.
  void record(int times);
  void play();
  std::string wait();

  std::vector<std::unique_ptr<Rank>>& ranks() { return ranks_; }
  NcclRanks& nccl() { return *nccl_; }

  void end_failed();

 private:
  void connect();

  const std::chrono::seconds timeout_;
  std::unique_ptr<NcclRanks> nccl_;
  Memory connecting_;  // a byte to each rank and one from each, for every rank
  std::vector<std::unique_ptr<Rank>> ranks_;
};

}  // namespace gpu_check
