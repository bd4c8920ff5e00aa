// Virtual ranks of the pull engine: one process, one stream each, all on device 0, their regions addresses of one
// another.
//
// Contract: run() makes one call on all ranks and returns what was wrong with it, "" where nothing was; all that befell
// any rank is told. After a failure the world is of no use: its failure words stay set.
// Ownership: owns regions, engines, streams and tensors; frees them when its ranks' kernels have ended, which they do
// by themselves within the calls' timeout. Thread safety: one thread at a time; it launches for all ranks.
#pragma once

#include <chrono>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "gpu/gpu_pull_executor.h"
#include "rank_tensors.h"

namespace gpu_check {

class PullWorld {
 public:
  struct Rank {
    Rank(const RingletCudaDevice& device, const GpuPullExecutor::Setup& staged,
         const GpuPullExecutor::Setup& registered)
        : staged(device, staged), registered(device, registered) {}
    RankTensors tensors;
    Call call;
    GpuPullExecutor staged, registered;  // the second takes all memory for its heap
    Stream stream;
  };

  /// as_groups: with the regions, the blocks and the small all-reduces that groups have (gpu/gpu_executors.h).
  PullWorld(int world, const Options& options, bool as_groups = false);

  /// Whether tensors are read in place or go through stages.
  std::string run(const Case& c, const Expectation& expectation, bool registered);

  /// One rank makes the call and no other: what its engine says then.
  std::string alone(int rank, const Expectation& expectation, std::chrono::milliseconds timeout);

  /// In parts, for a program that makes the same call again and again.
  void launch(bool registered);
  void wait();
  std::string difference(const Expectation& expectation) { return difference_of_all(ranks_, expectation); }
  void spoil();

  std::vector<std::unique_ptr<Rank>>& ranks() { return ranks_; }

 private:
  GpuPullExecutor& engine(Rank& rank, bool registered) { return registered ? rank.registered : rank.staged; }
  void launch_in_disorder(bool registered);

  const std::chrono::milliseconds timeout_;
  std::vector<std::unique_ptr<Memory>> regions_;
  std::vector<std::unique_ptr<Rank>> ranks_;
  std::mt19937 random_{11};
};

}  // namespace gpu_check
