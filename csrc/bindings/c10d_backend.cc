#include "bindings/c10d_backend.h"

#include <ATen/ops/empty.h>
#include <torch/csrc/utils/pybind.h>

#include "base/error.h"
#include "base/process.h"
#include "bindings/c10d_issue.h"
#include "bindings/lists.h"
#include "bindings/registered_allocator.h"
#include "bindings/tensors.h"
#include "engine/selector.h"

namespace py = pybind11;

namespace ringlet {

using c10d::OpType;

C10dBackend::C10dBackend(c10::intrusive_ptr<c10d::Store> store, std::string name, std::unique_ptr<Communicator> group,
                         Carrier carrier)
    : c10d::Backend(group->rank(), group->world()),
      store_(std::move(store)),
      name_(std::move(name)),
      group_(group.release()),
      carrier_(carrier) {}

namespace {

/// A forked child's has none of its parent's backends, which are not its own to close.
struct Living {
  std::mutex mutex;
  std::vector<c10::weak_intrusive_ptr<C10dBackend>> backends{};
};
constinit OfProcess<Living> living_of_process;

}  // namespace

c10::intrusive_ptr<C10dBackend> make_backend(const c10::intrusive_ptr<c10d::Store>& store, const std::string& name,
                                             const Member& member, Carrier carrier, std::chrono::milliseconds timeout) {
  auto engine = join(store, name, member, carrier, timeout);
  auto group = std::make_unique<Communicator>(std::move(engine), timeout);
  auto backend = c10::make_intrusive<C10dBackend>(store, name, std::move(group), carrier);
  Living& living = living_of_process.get();
  const std::lock_guard lock(living.mutex);
  std::erase_if(living.backends, [](const auto& one) { return one.expired(); });
  living.backends.emplace_back(backend);
  return backend;
}

void close_backends() {
  std::vector<c10::intrusive_ptr<C10dBackend>> open;
  {
    Living& living = living_of_process.get();
    const std::lock_guard lock(living.mutex);
    for (const auto& one : living.backends) {
      if (auto backend = one.lock()) open.push_back(std::move(backend));
    }
  }
  for (const auto& backend : open) backend->shutdown();
}

void C10dBackend::set_algorithm(const std::string& name) {
  named_algorithm(Collective::all_reduce, name);  // refuses an unknown name
  algorithm_ = name;
}

c10::intrusive_ptr<c10d::Backend::Options> C10dBackend::getBackendOptions() {
  auto options = c10::make_intrusive<GroupOptions>(algorithm_, name(carrier_));
  options->timeout = group_->timeout();
  options->max_ctas = group_->max_ctas();
  return options;
}

void C10dBackend::eagerConnectSingleDevice(at::Device device) {
  if (!device.is_cpu() && is_served(device)) gpu_transport(*group_, device);
}

c10::intrusive_ptr<c10d::Backend> C10dBackend::split(const c10::intrusive_ptr<c10d::Store>& store,
                                                     const std::vector<int>& ranks,
                                                     const c10::intrusive_ptr<Options>& options) {
  // Every rank of this group splits it as often, and its name is new: so is this one.
  const std::string name = name_ + "/split/" + std::to_string(splits_++);
  const auto place = std::find(ranks.begin(), ranks.end(), getRank());
  if (place == ranks.end()) return nullptr;
  const auto* given = dynamic_cast<const GroupOptions*>(options.get());
  const int64_t max_ctas = given != nullptr ? given->max_ctas : group_->max_ctas();
  check_max_ctas(max_ctas);
  const auto timeout = options ? options->timeout : group_->timeout();
  const Member member{static_cast<int>(place - ranks.begin()), static_cast<int>(ranks.size())};
  const auto began = Deadline::Clock::now();
  const Carrier carrier = given != nullptr && given->transport != "auto" ? parse_carrier(given->transport) : carrier_;
  auto part = make_backend(store, name, member, carrier, timeout);
  part->group().tell_made(std::chrono::duration<double>(Deadline::Clock::now() - began).count());
  part->set_max_ctas(max_ctas);
  part->set_algorithm(given != nullptr ? given->algorithm : algorithm_);
  return part;
}

c10d::ErrorType C10dBackend::getError() {
  const std::optional<ErrorKind> failure = group_->health().failure();
  if (!failure) return c10d::ErrorType::SUCCESS;
  if (*failure == ErrorKind::timeout) return c10d::ErrorType::TIMEOUT;
  return *failure == ErrorKind::peer_lost ? c10d::ErrorType::REMOTE_ERROR : c10d::ErrorType::COMM_ERROR;
}

at::Tensor C10dBackend::allocateTensor(long size, at::TensorOptions options) {
  if (!has_registered(options.device())) return at::empty({size}, options);
  const auto dtype = options.dtype_opt() ? c10::typeMetaToScalarType(*options.dtype_opt()) : c10::ScalarType::Float;
  return empty_registered({size}, dtype, options.device());
}

std::shared_ptr<c10::Allocator> C10dBackend::getMemAllocator() {
  return {&registered_allocator(), [](c10::Allocator*) {}};  // the process's own: never destroyed
}

C10dBackend::Handle C10dBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  const at::Tensor& tensor = only(tensors, "broadcast");
  Issue call(OpType::BROADCAST, "ringlet:broadcast", options);
  call.add(Collective::broadcast, tensor, options.rootRank == getRank() ? tensor : at::Tensor(), tensor.numel());
  call.set_root(options.rootRank, getSize());
  call.results = call.inputs = {tensor};
  return issue(std::move(call));
}

C10dBackend::Handle C10dBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  const at::Tensor& tensor = only(tensors, "all_reduce");
  if (tensor.is_sparse()) return allreduce_sparse(tensors, options);
  Issue call(OpType::ALLREDUCE, "ringlet:all_reduce", options);
  call.add(Collective::all_reduce, tensor, tensor, tensor.numel());
  call.set(reduction_of(options.reduceOp));
  call.results = {tensor};
  return issue(std::move(call));
}

C10dBackend::Handle C10dBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  const at::Tensor& tensor = only(tensors, "reduce");
  Issue call(OpType::REDUCE, "ringlet:reduce", options);
  call.add(Collective::reduce, options.rootRank == getRank() ? tensor : at::Tensor(), tensor, tensor.numel());
  call.set(reduction_of(options.reduceOp));
  call.set_root(options.rootRank, getSize());
  call.results = {tensor};
  return issue(std::move(call));
}

C10dBackend::Handle C10dBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                 const c10d::AllgatherOptions& options) {
  Tensors outputs{output}, inputs{input};
  return allgather_into_tensor_coalesced(outputs, inputs, options);
}

C10dBackend::Handle C10dBackend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                                 const c10d::AllgatherOptions& options) {
  return part([&] {
    check_pairs(outputs, inputs, "all_gather");
    Issue call(OpType::_ALLGATHER_BASE, "ringlet:all_gather", options);
    for (size_t i = 0; i < inputs.size(); ++i) {
      const int64_t expected = inputs[i].numel() * getSize();
      if (outputs[i].numel() != expected) refuse_elements("all_gather", "output", outputs[i], expected, getSize());
      call.add(Collective::all_gather, outputs[i], inputs[i], inputs[i].numel());
    }
    call.results = outputs;
    return issue(std::move(call));
  });
}

C10dBackend::Handle C10dBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                      const c10d::ReduceScatterOptions& options) {
  Tensors outputs{output}, inputs{input};
  return reduce_scatter_tensor_coalesced(outputs, inputs, options);
}

C10dBackend::Handle C10dBackend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                                 const c10d::ReduceScatterOptions& options) {
  return part([&] {
    check_pairs(outputs, inputs, "reduce_scatter");
    Issue call(OpType::_REDUCE_SCATTER_BASE, "ringlet:reduce_scatter", options);
    for (size_t i = 0; i < inputs.size(); ++i) {
      const int64_t expected = outputs[i].numel() * getSize();
      if (inputs[i].numel() != expected) refuse_elements("reduce_scatter", "input", inputs[i], expected, getSize());
      call.add(Collective::reduce_scatter, outputs[i], inputs[i], outputs[i].numel());
      call.set(reduction_of(options.reduceOp));
    }
    call.results = outputs;
    return issue(std::move(call));
  });
}

C10dBackend::Handle C10dBackend::barrier(const c10d::BarrierOptions& options) {
  Issue call(OpType::BARRIER, "ringlet:barrier", options);
  call.add(Collective::barrier, {}, {}, 0);
  return issue(std::move(call));
}

}  // namespace ringlet
