#include "comm/gpu_across_hosts.h"

#include <string_view>

#include "base/partition.h"
#include "gpu/check_device.h"

namespace ringlet {
namespace {

constexpr std::string_view kShape = "hierarchical";
constexpr GpuMessageExecutor::Limits kLimits{.scratch_bytes = size_t{8} << 20};

/// What is summed once is summed no more, and an average is divided at the end.
ReduceOp plain(ReduceOp op) { return op == ReduceOp::avg || op == ReduceOp::premul_sum ? ReduceOp::sum : op; }

}  // namespace

GpuAcrossHosts::GpuAcrossHosts(GpuPullExecutor& inside, std::unique_ptr<NcclCommunicator> across,
                               const RingletCudaDevice& device, const Selector& selector, const Topology& topology,
                               int rank)
    : inside_(inside),
      device_(device),
      topology_(topology),
      rank_(rank),
      communicator_(std::move(across)),
      messages_(*communicator_, device, kLimits, selector),
      collectives_(*communicator_) {}

bool GpuAcrossHosts::serves(const Call& call) noexcept {
  if (call.collective != Collective::all_reduce && call.collective != Collective::broadcast) return false;
  return call.algorithm == nullptr || std::string_view(call.algorithm->name) == kShape;
}

void GpuAcrossHosts::run(const Call& call, void* stream) {
  call.collective == Collective::all_reduce ? all_reduce(call, stream) : broadcast(call, stream);
  last_ = describe(call, find_algorithm(call.collective, kShape));
}

void GpuAcrossHosts::all_reduce(const Call& call, void* stream) {
  const int ranks = topology_.size(topology_.host(rank_)), index = topology_.index_on_host(rank_);
  Call in = call;
  in.algorithm = &half_of_two_shot(Half::scatter);
  if (call.op == ReduceOp::avg) in.op = ReduceOp::sum;
  inside_.run(in, stream);

  const Partition shards(call.count, static_cast<size_t>(ranks));
  const auto own = static_cast<size_t>(index);
  Call across = call;
  across.algorithm = nullptr;
  across.op = plain(call.op);
  across.count = shards.size(own);
  across.output = call.output + shards.offset(own) * element_size(call.dtype);
  across.input = across.output;
  sum_across(across, stream);
  if (across.count > 0 && call.op == ReduceOp::avg) divide(across.output, across, stream);

  Call out = call;
  out.algorithm = &half_of_two_shot(Half::gather);
  out.op = plain(call.op);
  out.input = call.output;
  inside_.run(out, stream);
}

void GpuAcrossHosts::broadcast(const Call& call, void* stream) {
  const int index = topology_.index_on_host(call.root);
  Call across = call;
  across.algorithm = nullptr;
  across.root = topology_.host(call.root);
  if (topology_.index_on_host(rank_) == index) collectives_.run(across, stream);
  Call out = call;
  out.algorithm = nullptr;
  out.root = index;
  out.input = topology_.index_on_host(rank_) == index ? call.output : nullptr;
  inside_.run(out, stream);
}

void GpuAcrossHosts::sum_across(const Call& call, void* stream) {
  std::byte *own = inside_.own_end(), *told = inside_.told_end();
  const auto tell = [own, told, stream](const NcclApi& api, NcclComm comm) {
    return api.all_reduce(own, told, sizeof(uint64_t), kNcclUint8, kNcclMax, comm, stream);
  };
  if (NcclCollectives::serves(call)) {
    collectives_.run(call, stream, tell);
  } else {
    messages_.run(call, stream);
    communicator_->call("ncclAllReduce", tell, Deadline::after(call.timeout));
  }
}

void GpuAcrossHosts::divide(std::byte* values, const Call& call, void* stream) {
  const std::byte* sources[] = {values};
  ReduceArgs args{};
  args.dst = values;
  args.srcs = sources;
  args.n = 1;
  args.count = call.count;
  args.scaled_source = -1;
  args.divisor = topology_.world();
  check_device(device_, device_.reduce(&args, call.dtype, ReduceOp::sum, stream), "dividing an average");
}

}  // namespace ringlet
