// c10d's handle of a call on ringlet. It completes with the core's Work, and has the Future that DDP asks for.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include "bindings/on_device.h"
#include "bindings/profiled.h"
#include "engine/work.h"

namespace ringlet {

/// The call's name in profilers and error messages.
struct Title {
  c10d::OpType type;
  const char* text;
  uint64_t sequence;
};

class C10dWork final : public c10d::Work {
 public:
  /// `device`: the outputs' device, if they are on one. The Future's value is then ready for a stream that waits for
  /// it.
  C10dWork(int rank, const Title& title, std::vector<at::Tensor> outputs, const std::vector<at::Tensor>& profiled,
           std::optional<c10::Device> device = {});

  /// Completes this handle when `work` is complete.
  static void follow(const c10::intrusive_ptr<C10dWork>& self, std::shared_ptr<ringlet::Work> work);
  /// Completes this handle when all of `parts` are, with the first error in their order.
  static void follow(const c10::intrusive_ptr<C10dWork>& self, std::vector<c10::intrusive_ptr<C10dWork>> parts);
  /// Follows calls on a device. The Future is ready for streams at once; the handle completes when the device is done.
  static void follow(const c10::intrusive_ptr<C10dWork>& self, const Enqueued& enqueued);
  void complete(std::exception_ptr error);
  /// What profilers see of the call; null if none runs. torch's own event for a handle would also end when the profiler
  /// has stopped.
  Profiled* profiled() const { return profiled_.get(); }

  bool isCompleted() override;
  bool wait(std::chrono::milliseconds timeout) override;
  std::vector<at::Tensor> result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    expect_outside_waiter();
    return future_;
  }
  uint64_t getSequencenumber() const override { return sequence_; }
  /// The rank that a received message came from.
  int sourceRank() const override;

 private:
  void ended(std::exception_ptr error);
  void assist(const Deadline& deadline);
  void expect_outside_waiter();
  bool wait_on_device(std::chrono::milliseconds timeout);

  std::unique_ptr<Profiled> profiled_;
  std::vector<at::Tensor> outputs_;
  std::optional<c10::Device> device_;
  uint64_t sequence_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  std::shared_ptr<c10::Event> done_;                 // on a device: what a stream waits for
  std::shared_ptr<ringlet::Work> work_;              // what this handle follows ...
  std::vector<c10::intrusive_ptr<C10dWork>> parts_;  // ... or the handles it stands for
};

}  // namespace ringlet
