// One call of ringlet or of torch.distributed: its tensors, checked, and what the Communicator runs on them. The calls
// for Python (collectives.cc) and the backend's virtual functions (c10d_issue.h) fill it alike.
//
// Contract: tensors that are not contiguous are copied into and out of the call. On a GPU equal blocks are packed into
// one tensor. The caller holds no lock of the interpreter when it runs or starts an Issue.
// Ownership: holds every tensor whose memory its steps use, until the call is complete. Thread safety: none; one thread
// fills it and hands it over.
#pragma once

#include <deque>
#include <memory>
#include <vector>

#include "bindings/hold.h"
#include "bindings/on_device.h"
#include "bindings/staging.h"
#include "comm/communicator.h"

namespace ringlet {

struct Issue {
  using Tensors = std::vector<at::Tensor>;

  /// One collective of the Communicator; coalesced calls have many.
  struct Step {
    Call call{};
    std::unique_ptr<Blocks> blocks{};
  };

  explicit Issue(const char* call) : call(call) {}

  /// Adds a collective, of which `given` has all but dtype, memory and label. A tensor is undefined if this rank has
  /// none. Throws InvalidUsage if the tensors cannot be right.
  void add(const Call& given, const at::Tensor& output, const at::Tensor& input);
  /// Adds a collective on blocks of one dtype. `counts`: elements by the schedule's chunk.
  void add_blocks(const Call& given, const Tensors& outputs, const Tensors& inputs, std::vector<size_t> counts);
  /// Checks the calls as the Communicator does before it runs them.
  void check(Communicator& group);
  c10::Device device() const { return common_device(keep, call); }

  /// Whether one call is all there is to do before the results are delivered.
  bool single() const { return steps.size() == 1 && staging.empty(); }
  void run(Communicator& group) const;
  std::shared_ptr<Work> start(Communicator& group) &&;
  /// For enqueue(), which must return before the Issue ends.
  DeviceCalls on(const c10::Device& device, bool async) const;
  /// Holds all memory that the calls use.
  MemoryHold keep_alive() const;

  const char* call;  ///< the collective's name, for errors
  std::deque<Step> steps{};
  Tensors keep{};
  Tensors inputs{};  ///< the caller's; profilers show their shapes
  Staging staging{};
  /// Instead of steps: calls with work between them.
  Communicator::Job job{};

 private:
  void add_packed(const Call& given, const Tensors& outputs, const Tensors& inputs);
  at::Tensor packed(const Tensors& tensors, DType dtype, bool received);
  std::byte* readable(const at::Tensor& tensor, DType dtype);
  std::byte* writable(const at::Tensor& tensor, DType dtype);
  void check_outputs(const Tensors& outputs) const;
  /// All calls, with what is to be done before and between them. The Issue must outlive it.
  Communicator::Job whole() const;
};

}  // namespace ringlet
