#include "bindings/c10d_backend.h"

#include <pybind11/chrono.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>

#include "base/error.h"
#include "bindings/module.h"
#include "bindings/tensors.h"
#include "bindings/torch_store.h"
#include "engine/selector.h"
#include "transport/shared_memory.h"

namespace py = pybind11;

namespace ringlet {
namespace {

using c10d::OpType;

struct Reduction {
  ReduceOp op;
  double scale = 1.0;
};

Reduction reduction_of(const c10d::ReduceOp& op) {
  switch (op.op_) {
    case c10d::ReduceOp::SUM: return {ReduceOp::sum};
    case c10d::ReduceOp::AVG: return {ReduceOp::avg};
    case c10d::ReduceOp::PRODUCT: return {ReduceOp::product};
    case c10d::ReduceOp::MIN: return {ReduceOp::min};
    case c10d::ReduceOp::MAX: return {ReduceOp::max};
    case c10d::ReduceOp::BAND: return {ReduceOp::band};
    case c10d::ReduceOp::BOR: return {ReduceOp::bor};
    case c10d::ReduceOp::BXOR: return {ReduceOp::bxor};
    case c10d::ReduceOp::PREMUL_SUM: {
      const auto* supplement = dynamic_cast<const c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
      if (supplement == nullptr) throw InvalidUsage("PREMUL_SUM comes without its factor");
      const auto& factor = supplement->tensor_factor;
      return {ReduceOp::premul_sum, factor.defined() ? factor.item<double>() : supplement->double_factor};
    }
    default: throw InvalidUsage("ringlet has no such reduce operation");
  }
}

const at::Tensor& only(const std::vector<at::Tensor>& tensors, const char* call) {
  if (tensors.size() != 1)
    throw InvalidUsage(std::string(call) + ": one tensor a rank, got " + std::to_string(tensors.size()));
  return tensors[0];
}

/// One flat registered tensor for a list of equal ones; InvalidUsage where they differ.
at::Tensor flat_for(const std::vector<at::Tensor>& list, size_t world, const at::Tensor& block, const char* call) {
  if (list.size() != world) {
    throw InvalidUsage(std::string(call) + ": a list of " + std::to_string(list.size()) + " tensors for " +
                       std::to_string(world) + " ranks");
  }
  for (const at::Tensor& tensor : list) {
    if (tensor.numel() != block.numel() || tensor.scalar_type() != block.scalar_type()) {
      throw InvalidUsage(std::string(call) + ": tensors of different size or dtype in a list are not supported");
    }
  }
  return empty_registered({static_cast<int64_t>(world) * block.numel()}, block.scalar_type());
}

void unpack(const at::Tensor& flat, const std::vector<at::Tensor>& list) {
  int64_t offset = 0;
  for (const at::Tensor& tensor : list) {
    tensor.copy_(flat.narrow(0, offset, tensor.numel()).view(tensor.sizes()));
    offset += tensor.numel();
  }
}

void pack(const std::vector<at::Tensor>& list, const at::Tensor& flat) {
  int64_t offset = 0;
  for (const at::Tensor& tensor : list) {
    flat.narrow(0, offset, tensor.numel()).view(tensor.sizes()).copy_(tensor);
    offset += tensor.numel();
  }
}

}  // namespace

/// All that one call needs, filled by the virtuals.
struct C10dBackend::Issue {
  Collective collective;
  OpType type;
  const char* title;
  at::Tensor output{};  // undefined where this rank has none
  at::Tensor input{};
  size_t count = 0;  // elements of the buffer, or of one block
  Reduction reduction{ReduceOp::sum};
  int root = 0;
  std::chrono::milliseconds timeout{0};
  bool async = true;
  Tensors results{};
  std::function<void()> deliver{};  // after completion: results that go elsewhere
};

C10dBackend::C10dBackend(int rank, int size, std::unique_ptr<Communicator> group)
    : c10d::Backend(rank, size), group_(std::move(group)) {}

C10dBackend::~C10dBackend() {
  // The group's end joins its threads, which may be waiting for the GIL to let tensors go.
  if (PyGILState_Check()) {
    const py::gil_scoped_release unlocked;
    group_.reset();
  }
}

void C10dBackend::set_algorithm(const std::string& name) {
  named_algorithm(Collective::all_reduce, name);  // refuses a name that there is not
  algorithm_ = name;
}

C10dBackend::Handle C10dBackend::issue(Issue issue) {
  Call call;
  call.collective = issue.collective;
  if (issue.collective == Collective::all_reduce) call.algorithm = named_algorithm(issue.collective, algorithm_);
  const auto bind = [&](const at::Tensor& tensor, const char* role) -> std::byte* {
    if (!tensor.defined()) return nullptr;
    check_tensor(tensor, issue.title, role);
    call.dtype = dtype_of(tensor);
    return data_of(tensor);
  };
  call.input = bind(issue.input, "input");
  call.output = bind(issue.output, "output");
  call.count = issue.count;
  call.op = issue.reduction.op;
  call.scale = issue.reduction.scale;
  call.root = issue.root;
  call.timeout = issue.timeout;
  Tensors profiled;
  if (issue.input.defined()) profiled.push_back(issue.input);
  auto handle = c10::make_intrusive<C10dWork>(getRank(), Title{issue.type, issue.title, group_->sequence()},
                                              issue.results, profiled);
  if (!issue.async) {
    group_->run(call);
    if (issue.deliver) issue.deliver();
    handle->complete(nullptr);
    return handle;
  }
  auto keep = std::make_shared<Tensors>(Tensors{issue.input, issue.output});
  C10dWork::follow(handle, *group_->start(call, std::move(keep)), std::move(issue.deliver));
  return handle;
}

C10dBackend::Handle C10dBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  const at::Tensor& tensor = only(tensors, "broadcast");
  const bool root = options.rootRank == getRank();
  return issue({.collective = Collective::broadcast,
                .type = OpType::BROADCAST,
                .title = "ringlet:broadcast",
                .output = tensor,
                .input = root ? tensor : at::Tensor(),
                .count = static_cast<size_t>(tensor.numel()),
                .root = static_cast<int>(options.rootRank),
                .timeout = options.timeout,
                .async = options.asyncOp,
                .results = {tensor}});
}

C10dBackend::Handle C10dBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  const at::Tensor& tensor = only(tensors, "all_reduce");
  return issue({.collective = Collective::all_reduce,
                .type = OpType::ALLREDUCE,
                .title = "ringlet:all_reduce",
                .output = tensor,
                .input = tensor,
                .count = static_cast<size_t>(tensor.numel()),
                .reduction = reduction_of(options.reduceOp),
                .timeout = options.timeout,
                .async = options.asyncOp,
                .results = {tensor}});
}

C10dBackend::Handle C10dBackend::allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  if (tensors.empty()) throw InvalidUsage("all_reduce_coalesced: no tensors");
  Handle last;
  for (at::Tensor& tensor : tensors) {
    Tensors one{tensor};
    last = allreduce(one, options);  // in issue order: the last one's end is the end of all
  }
  return last;
}

C10dBackend::Handle C10dBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  const at::Tensor& tensor = only(tensors, "reduce");
  const bool root = options.rootRank == getRank();
  return issue({.collective = Collective::reduce,
                .type = OpType::REDUCE,
                .title = "ringlet:reduce",
                .output = root ? tensor : at::Tensor(),
                .input = tensor,
                .count = static_cast<size_t>(tensor.numel()),
                .reduction = reduction_of(options.reduceOp),
                .root = static_cast<int>(options.rootRank),
                .timeout = options.timeout,
                .async = options.asyncOp,
                .results = {tensor}});
}

C10dBackend::Handle C10dBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                 const c10d::AllgatherOptions& options) {
  if (output.numel() != input.numel() * getSize() || output.scalar_type() != input.scalar_type()) {
    throw InvalidUsage("all_gather: the output must have world times the input's elements, and its dtype");
  }
  return issue({.collective = Collective::all_gather,
                .type = OpType::_ALLGATHER_BASE,
                .title = "ringlet:all_gather",
                .output = output,
                .input = input,
                .count = static_cast<size_t>(input.numel()),
                .timeout = options.timeout,
                .async = options.asyncOp,
                .results = {output}});
}

C10dBackend::Handle C10dBackend::allgather(Lists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  const at::Tensor& input = only(inputs, "all_gather");
  const Tensors list = outputs.at(0);
  const at::Tensor flat = flat_for(list, static_cast<size_t>(getSize()), input, "all_gather");
  return issue({.collective = Collective::all_gather,
                .type = OpType::ALLGATHER,
                .title = "ringlet:all_gather",
                .output = flat,
                .input = input,
                .count = static_cast<size_t>(input.numel()),
                .timeout = options.timeout,
                .async = options.asyncOp,
                .results = list,
                .deliver = [flat, list] { unpack(flat, list); }});
}

C10dBackend::Handle C10dBackend::gather(Lists& outputs, Tensors& inputs, const c10d::GatherOptions& options) {
  const at::Tensor& input = only(inputs, "gather");
  Issue call{.collective = Collective::gather,
             .type = OpType::GATHER,
             .title = "ringlet:gather",
             .input = input,
             .count = static_cast<size_t>(input.numel()),
             .root = static_cast<int>(options.rootRank),
             .timeout = options.timeout,
             .async = options.asyncOp};
  if (options.rootRank == getRank()) {
    const Tensors list = outputs.at(0);
    const at::Tensor flat = flat_for(list, static_cast<size_t>(getSize()), input, "gather");
    call.output = flat;
    call.results = list;
    call.deliver = [flat, list] { unpack(flat, list); };
  }
  return issue(std::move(call));
}

C10dBackend::Handle C10dBackend::scatter(Tensors& outputs, Lists& inputs, const c10d::ScatterOptions& options) {
  const at::Tensor& output = only(outputs, "scatter");
  Issue call{.collective = Collective::scatter,
             .type = OpType::SCATTER,
             .title = "ringlet:scatter",
             .output = output,
             .count = static_cast<size_t>(output.numel()),
             .root = static_cast<int>(options.rootRank),
             .timeout = options.timeout,
             .async = options.asyncOp,
             .results = {output}};
  if (options.rootRank == getRank()) {
    call.input = flat_for(inputs.at(0), static_cast<size_t>(getSize()), output, "scatter");
    pack(inputs[0], call.input);
  }
  return issue(std::move(call));
}

C10dBackend::Handle C10dBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                      const c10d::ReduceScatterOptions& options) {
  if (input.numel() != output.numel() * getSize() || output.scalar_type() != input.scalar_type()) {
    throw InvalidUsage("reduce_scatter: the input must have world times the output's elements, and its dtype");
  }
  return issue({.collective = Collective::reduce_scatter,
                .type = OpType::_REDUCE_SCATTER_BASE,
                .title = "ringlet:reduce_scatter",
                .output = output,
                .input = input,
                .count = static_cast<size_t>(output.numel()),
                .reduction = reduction_of(options.reduceOp),
                .timeout = options.timeout,
                .async = options.asyncOp,
                .results = {output}});
}

C10dBackend::Handle C10dBackend::reduce_scatter(Tensors& outputs, Lists& inputs,
                                                const c10d::ReduceScatterOptions& options) {
  at::Tensor output = only(outputs, "reduce_scatter");
  at::Tensor flat = flat_for(inputs.at(0), static_cast<size_t>(getSize()), output, "reduce_scatter");
  pack(inputs[0], flat);
  return _reduce_scatter_base(output, flat, options);
}

C10dBackend::Handle C10dBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                               std::vector<int64_t>& output_splits, std::vector<int64_t>& input_splits,
                                               const c10d::AllToAllOptions& options) {
  const auto uneven = [](const std::vector<int64_t>& splits) {
    return std::adjacent_find(splits.begin(), splits.end(), std::not_equal_to<>()) != splits.end();
  };
  if (uneven(output_splits) || uneven(input_splits))
    throw InvalidUsage("all_to_all: uneven splits are not supported yet");
  if (input.numel() != output.numel() || input.numel() % getSize() != 0 ||
      output.scalar_type() != input.scalar_type()) {
    throw InvalidUsage("all_to_all: output and input must have one size, a multiple of the world, and one dtype");
  }
  return issue({.collective = Collective::all_to_all,
                .type = OpType::ALLTOALL_BASE,
                .title = "ringlet:all_to_all",
                .output = output,
                .input = input,
                .count = static_cast<size_t>(input.numel() / getSize()),
                .timeout = options.timeout,
                .async = options.asyncOp,
                .results = {output}});
}

C10dBackend::Handle C10dBackend::barrier(const c10d::BarrierOptions& options) {
  return issue({.collective = Collective::barrier,
                .type = OpType::BARRIER,
                .title = "ringlet:barrier",
                .timeout = options.timeout,
                .async = options.asyncOp});
}

namespace {

Message message_of(const at::Tensor& tensor, int peer, bool sending) {
  check_tensor(tensor, sending ? "send" : "recv", "given");
  return {peer, sending, dtype_of(tensor), static_cast<size_t>(tensor.numel()), data_of(tensor), {}};
}

c10::intrusive_ptr<c10d::Work> start_message(Communicator& group, const at::Tensor& tensor, const Message& message) {
  const Title title{message.sending ? OpType::SEND : OpType::RECV, message.sending ? "ringlet:send" : "ringlet:recv",
                    group.sequence()};
  const std::vector<at::Tensor> tensors{tensor};
  auto handle = c10::make_intrusive<C10dWork>(group.rank(), title, tensors, tensors);
  C10dWork::follow(handle, *group.start(message, std::make_shared<at::Tensor>(tensor)), {});
  return handle;
}

c10::intrusive_ptr<C10dBackend> make_backend(c10::intrusive_ptr<c10d::Store> store, const std::string& name, int rank,
                                             int size, std::chrono::milliseconds timeout) {
  TorchStore rendezvous(std::move(store));
  auto transport = connect_shared_memory(rendezvous, name, rank, size, Deadline::after(timeout));
  return c10::make_intrusive<C10dBackend>(rank, size, std::make_unique<Communicator>(std::move(transport), timeout));
}

}  // namespace

C10dBackend::Handle C10dBackend::send(Tensors& tensors, int peer, int) {
  return start_message(*group_, only(tensors, "send"), message_of(only(tensors, "send"), peer, true));
}

C10dBackend::Handle C10dBackend::recv(Tensors& tensors, int peer, int) {
  return start_message(*group_, only(tensors, "recv"), message_of(only(tensors, "recv"), peer, false));
}

at::Tensor C10dBackend::allocateTensor(long size, at::TensorOptions options) {
  return empty_registered(
      {size}, options.dtype_opt() ? c10::typeMetaToScalarType(*options.dtype_opt()) : c10::ScalarType::Float);
}

void bind_c10d(py::module_& m) {
  py::module_::import("torch.distributed");  // its classes must be registered before ours names one as its base
  py::class_<C10dBackend, c10::intrusive_ptr<C10dBackend>, c10d::Backend>(m, "Backend")
      .def_property("algorithm", &C10dBackend::algorithm, &C10dBackend::set_algorithm,
                    "All-reduce algorithm by name; \"auto\" lets the selector choose by size and world.");
  m.def("make_backend", &make_backend, py::arg("store"), py::arg("name"), py::arg("rank"), py::arg("size"),
        py::arg("timeout"), py::call_guard<py::gil_scoped_release>());
}

}  // namespace ringlet
