// One call of torch.distributed. The backend's virtual functions fill it, the Communicator runs it.
//
// Ownership: holds every tensor whose memory its steps use, until the call is complete. Thread safety: none; one thread
// fills it and hands it over.
#pragma once

#include <cstring>
#include <deque>

#include "bindings/c10d_backend.h"
#include "bindings/hold.h"
#include "bindings/on_device.h"
#include "bindings/staging.h"

namespace ringlet {

struct Reduction {
  ReduceOp op = ReduceOp::sum;
  double scale = 1.0;  ///< premul_sum's
};
Reduction reduction_of(const c10d::ReduceOp& op);

struct C10dBackend::Issue {
  /// One collective of the Communicator; coalesced calls have many.
  struct Step {
    Call call{};
    std::unique_ptr<Blocks> blocks{};
  };

  Issue(c10d::OpType type, const char* title) : type(type), title(title) {}

  /// Adds a collective. A tensor is undefined if this rank has none. `count`: elements of the buffer, or of a block.
  Step& add(Collective collective, const at::Tensor& output, const at::Tensor& input, int64_t count);
  /// Adds a collective on blocks of one dtype. `counts`: elements by the schedule's chunk.
  Step& add_blocks(Collective collective, const Tensors& outputs, const Tensors& inputs, std::vector<size_t> counts);
  void set(const Reduction& reduction);
  void set_root(int64_t root, int world);
  template <typename Options>
  void set(const Options& options) {
    timeout = options.timeout;
    async = options.asyncOp;
  }
  /// Throws InvalidUsage if outputs of coalesced collectives overlap each other, or inputs of later ones.
  void check_results(int rank, int world) const;
  /// Holds all memory that the calls use.
  MemoryHold hold() const;
  /// Whether one call is all there is to do before the results are delivered.
  bool single() const;
  /// All calls, with what is to be done before and between them. The Issue must outlive it.
  Communicator::Job whole() const;
  c10::Device device() const { return common_device(keep, call()); }

  c10d::OpType type;
  const char* title;
  std::chrono::milliseconds timeout{0};
  bool async = true;
  Tensors results{};   ///< the Future's value
  Tensors profiled{};  ///< whose shapes profilers show
  std::deque<Step> steps{};
  Tensors keep{};
  Staging staging{};
  /// Instead of steps: calls with work between them.
  Communicator::Job job{};

 private:
  Step& add_packed(Collective collective, const Tensors& outputs, const Tensors& inputs);
  at::Tensor packed(const Tensors& tensors, DType dtype, bool received);
  std::byte* readable(const at::Tensor& tensor, DType dtype);
  std::byte* writable(const at::Tensor& tensor, DType dtype);
  /// The collective's name, for errors: the title without its prefix.
  const char* call() const { return title + std::strlen("ringlet:"); }
  void check_outputs(const Tensors& outputs) const;
};

}  // namespace ringlet
