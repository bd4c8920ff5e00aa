// One call of torch.distributed, which the backend's virtual functions fill.
#pragma once

#include <cstring>

#include "bindings/c10d_backend.h"
#include "bindings/issue.h"

namespace ringlet {

struct Reduction {
  ReduceOp op = ReduceOp::sum;
  double scale = 1.0;  ///< premul_sum's
};
Reduction reduction_of(const c10d::ReduceOp& op);

struct C10dBackend::Issue final : ringlet::Issue {
  /// `title`: what profilers show, "ringlet:" and the collective's name.
  template <typename Options>
  Issue(c10d::OpType type, const char* title, const Options& options)
      : ringlet::Issue(title + std::strlen("ringlet:")),
        type(type),
        title(title),
        timeout(options.timeout),
        async(options.asyncOp) {}

  /// As ringlet::Issue. `count`: elements of the buffer, or of a block.
  void add(Collective collective, const at::Tensor& output, const at::Tensor& input, int64_t count);
  void add_blocks(Collective collective, const Tensors& outputs, const Tensors& inputs, std::vector<size_t> counts);
  void set(const Reduction& reduction);
  void set_root(int64_t root, int world);
  /// Throws InvalidUsage if outputs of coalesced collectives overlap each other, or inputs of later ones.
  void check_results(int rank, int world) const;

  c10d::OpType type;
  const char* title;
  std::chrono::milliseconds timeout;
  bool async;
  Tensors results{};  ///< the Future's value
};

}  // namespace ringlet
