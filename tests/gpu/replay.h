// Calls of all virtual ranks as CUDA graphs, one a rank: what is timed is then the device, not the thread that launches
// for all ranks.
//
// Contract: the constructor has `call`, which makes one call on all streams, captured so many times; launch() enqueues
// them once more. Throws DeviceError where CUDA refuses. On a device that is no GPU (an emulated one) launch() makes
// the calls instead. Ownership: owns the graphs; what the calls use outlives it. Thread safety: one thread at a time.
#pragma once

#include <functional>
#include <vector>

namespace gpu_check {

class Replay {
 public:
  Replay(std::vector<void*> streams, int calls, std::function<void()> call);
  ~Replay();
  Replay(const Replay&) = delete;
  Replay& operator=(const Replay&) = delete;

  void launch();
  int calls() const { return calls_; }

 private:
  void capture();

  const std::vector<void*> streams_;
  const int calls_;
  const std::function<void()> call_;
  std::vector<void*> graphs_;  // by stream; none on a device that is no GPU
};

}  // namespace gpu_check
