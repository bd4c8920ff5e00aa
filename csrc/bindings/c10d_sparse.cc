// All-reduce of sparse COO tensors: every rank gathers all entries and adds them up in rank order, so that all ranks
// get the same bits. Every rank holds the entries of all ranks.
#include <ATen/ATen.h>

#include "base/error.h"
#include "bindings/c10d_issue.h"
#include "bindings/lists.h"
#include "bindings/tensors.h"

namespace ringlet {
namespace {

using Run = std::function<void(Call)>;

/// What a rank sends about its tensor, so that all ranks can compare shapes.
struct Shape {
  int64_t entries, sparse_dims, dense_dims, digest;
  bool operator==(const Shape&) const = default;
};

Shape shape_of(const at::Tensor& tensor) {
  uint64_t digest = 0;
  for (const int64_t size : tensor.sizes()) digest = (digest ^ static_cast<uint64_t>(size)) * 0x9e3779b97f4a7c15u;
  return {tensor._nnz(), tensor.sparse_dim(), tensor.dense_dim(), static_cast<int64_t>(digest)};
}

/// Gathers one contiguous tensor of each rank; `rows[q]`: its size along dimension `along`.
std::vector<at::Tensor> gather(const at::Tensor& own, const std::vector<int64_t>& rows, int64_t along, const Run& run) {
  std::vector<at::Tensor> all;
  Blocks blocks;
  for (const int64_t count : rows) {
    std::vector<int64_t> sizes = own.sizes().vec();
    sizes[along] = count;
    all.push_back(at::empty(sizes, own.options()));
    blocks.outputs.push_back(data_of(all.back()));
    blocks.counts.push_back(static_cast<size_t>(all.back().numel()));
    blocks.longest = std::max(blocks.longest, blocks.counts.back());
  }
  blocks.inputs = {data_of(own)};
  for (const size_t count : blocks.counts) blocks.uneven = blocks.uneven || count != blocks.longest;
  Call call;
  call.collective = Collective::all_gather;
  call.dtype = dtype_of(own);
  call.count = blocks.longest;
  call.blocks = &blocks;
  run(call);
  return all;
}

void all_reduce(at::Tensor tensor, int world, std::chrono::milliseconds timeout, const Run& run_now) {
  const at::NoGradGuard no_grad;
  const Run run = [&](Call call) {
    call.timeout = timeout;
    run_now(call);
  };
  const at::Tensor own = tensor.coalesce();
  const Shape mine = shape_of(own);
  std::vector<Shape> shapes(world);
  Call exchange;
  exchange.collective = Collective::all_gather;
  exchange.dtype = DType::int64;
  exchange.count = sizeof(Shape) / sizeof(int64_t);
  exchange.input = reinterpret_cast<const std::byte*>(&mine);
  exchange.output = reinterpret_cast<std::byte*>(shapes.data());
  run(exchange);
  std::vector<int64_t> entries;
  for (int q = 0; q < world; ++q) {
    Shape same = shapes[q];
    same.entries = mine.entries;
    if (same != mine) {
      throw InvalidUsage("all_reduce: sparse tensors must have the same shape on all ranks, got another on rank " +
                         std::to_string(q));
    }
    entries.push_back(shapes[q].entries);
  }
  const std::vector<at::Tensor> indices = gather(own._indices().contiguous(), entries, 1, run);
  const std::vector<at::Tensor> values = gather(own._values().contiguous(), entries, 0, run);
  at::Tensor sum;
  for (int q = 0; q < world; ++q) {
    const at::Tensor of_rank = at::_sparse_coo_tensor_unsafe(indices[q], values[q], own.sizes(), own.options());
    sum = q == 0 ? of_rank : sum + of_rank;
  }
  tensor.copy_(sum.coalesce());
}

}  // namespace

C10dBackend::Handle C10dBackend::allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) {
  const at::Tensor tensor = only(tensors, "all_reduce");
  const char* refusal = !tensor.is_sparse() ? "a tensor of a layout other than COO"
                        : !tensor.is_cpu()  ? "a sparse tensor outside host memory"
                        : options.reduceOp.op_ != c10d::ReduceOp::SUM
                            ? "a sparse tensor with an operation other than sum"
                            : nullptr;
  if (refusal != nullptr)
    throw InvalidUsage(std::string("all_reduce: ringlet does not support ") + refusal + ": make it dense first");
  Issue call(c10d::OpType::_ALLREDUCE_SPARSE, "ringlet:all_reduce", options);
  call.results = call.keep = call.inputs = {tensor};
  call.job = [tensor, world = getSize(), timeout = options.timeout](const Run& run) {
    all_reduce(tensor, world, timeout, run);
  };
  return issue(std::move(call));
}

}  // namespace ringlet
