#include "comm/gpu_across_hosts.h"

#include <string_view>
#include <vector>

#include "base/partition.h"
#include "gpu/check_device.h"

namespace ringlet {
namespace {

constexpr std::string_view kShape = "hierarchical";
constexpr GpuMessageExecutor::Limits kLimits{.scratch_bytes = size_t{8} << 20};
constexpr size_t kScratchBytes = size_t{4} << 20;

/// What is summed once is summed no more, and an average is divided at the end.
ReduceOp plain(ReduceOp op) { return op == ReduceOp::avg || op == ReduceOp::premul_sum ? ReduceOp::sum : op; }

/// Whether ranks pass blocks of other ranks; kernels need those of a host in one piece.
bool has_blocks(Collective collective) {
  return collective == Collective::reduce_scatter || collective == Collective::all_gather ||
         collective == Collective::gather || collective == Collective::scatter;
}

bool needs_scratch(Collective collective) {
  return collective == Collective::reduce || (has_blocks(collective) && collective != Collective::all_gather);
}

}  // namespace

GpuAcrossHosts::GpuAcrossHosts(GpuPullExecutor& inside, std::unique_ptr<NcclCommunicator> across,
                               const RingletCudaDevice& device, const Selector& selector, const Topology& topology,
                               int rank)
    : inside_(inside),
      device_(device),
      topology_(topology),
      rank_(rank),
      host_(topology.host(rank)),
      index_(topology.index_on_host(rank)),
      ranks_(topology.size(host_)),
      communicator_(std::move(across)),
      messages_(*communicator_, device, kLimits, selector),
      collectives_(*communicator_) {
  for (int q = 0; q < topology_.world(); ++q) adjacent_ = adjacent_ && topology_.host(q) == q / ranks_;
  void* memory = nullptr;
  check_device(device_, device_.allocate(&memory, kScratchBytes + sizeof(uint64_t)), "allocating scratch");
  scratch_ = static_cast<std::byte*>(memory);
}

GpuAcrossHosts::~GpuAcrossHosts() { device_.release(scratch_); }

bool GpuAcrossHosts::serves(const Call& call) const noexcept {
  const Collective which = call.collective;
  if (call.algorithm != nullptr && std::string_view(call.algorithm->name) != kShape) return false;
  if (which == Collective::all_reduce || which == Collective::broadcast) return true;
  if (has_blocks(which) && !adjacent_) return false;
  if (needs_scratch(which)) return buffer_bytes(call, topology_.world()) <= kScratchBytes;
  return which == Collective::all_gather;
}

std::string GpuAcrossHosts::limits(size_t bytes) const {
  std::string text;
  if (!adjacent_) {
    text +=
        "; NCCL alone for reduce_scatter, all_gather, gather and scatter, since ranks of a host do not follow "
        "each other";
  }
  if (bytes > kScratchBytes) {
    text += std::string("; NCCL alone for ") + (adjacent_ ? "reduce, reduce_scatter, gather and scatter" : "reduce") +
            " beyond " + std::to_string(kScratchBytes) + " bytes";
  }
  return text;
}

void GpuAcrossHosts::run(const Call& call, void* stream) {
  check_call(call);
  switch (call.collective) {
    case Collective::all_reduce: all_reduce(call, stream); break;
    case Collective::broadcast: broadcast(call, stream); break;
    case Collective::reduce: reduce(call, stream); break;
    case Collective::reduce_scatter: reduce_scatter(call, stream); break;
    case Collective::all_gather: all_gather(call, stream); break;
    case Collective::gather: gather(call, stream); break;
    default: scatter(call, stream);
  }
  last_ = describe(call, find_algorithm(call.collective, kShape));
}

/// Before NCCL has anything of it.
void GpuAcrossHosts::check_call(const Call& call) const {
  const auto needs = [&](const char* what) {
    throw InvalidUsage(describe(call) + " on a GPU: this rank needs an " + what);
  };
  if (call.input == nullptr && input_elements(call, rank_, topology_.world()) != 0) needs("input");
  if (call.output == nullptr && output_elements(call, rank_, topology_.world()) != 0) needs("output");
}

/// As ranks of a host call it; which algorithm, the selector says.
Call GpuAcrossHosts::inside(const Call& call) const {
  Call in = call;
  in.algorithm = nullptr;
  in.root = has_root(call.collective) ? topology_.index_on_host(call.root) : 0;
  if (call.op == ReduceOp::avg) in.op = ReduceOp::sum;
  return in;
}

/// Whether this rank has the root's index on its host: what comes from the root, or goes there, passes it.
bool GpuAcrossHosts::leads(const Call& call) const { return index_ == topology_.index_on_host(call.root); }

/// The blocks of a host's ranks.
std::byte* GpuAcrossHosts::of_host(const std::byte* buffer, int host, const Call& call) const {
  return const_cast<std::byte*>(buffer) + static_cast<size_t>(host * ranks_) * call.count * element_size(call.dtype);
}

void GpuAcrossHosts::all_reduce(const Call& call, void* stream) {
  Call in = inside(call);
  in.algorithm = &half_of_two_shot(Half::scatter);
  inside_.run(in, stream);

  const Partition shards(call.count, static_cast<size_t>(ranks_));
  const auto own = static_cast<size_t>(index_);
  Call across = call;
  across.count = shards.size(own);
  across.output = call.output + shards.offset(own) * element_size(call.dtype);
  across.input = across.output;
  sum_across(across, stream);

  Call out = call;
  out.algorithm = &half_of_two_shot(Half::gather);
  out.op = plain(call.op);
  out.input = call.output;
  inside_.run(out, stream);
}

void GpuAcrossHosts::broadcast(const Call& call, void* stream) {
  Call across = call;
  across.algorithm = nullptr;
  across.root = topology_.host(call.root);
  if (leads(call)) collectives_.run(across, stream, word(stream));
  Call out = inside(call);
  out.input = leads(call) ? call.output : nullptr;
  inside_.run(out, stream);
}

void GpuAcrossHosts::reduce(const Call& call, void* stream) {
  Call in = inside(call);
  in.output = leads(call) ? scratch_ : nullptr;
  inside_.run(in, stream);
  if (!leads(call)) return;
  Call across = call;
  across.root = topology_.host(call.root);
  across.input = scratch_;
  across.output = rank_ == call.root ? call.output : nullptr;
  sum_across(across, stream);
  inside_.look(stream);
}

void GpuAcrossHosts::reduce_scatter(const Call& call, void* stream) {
  Call in = inside(call);
  for (int h = 0; h < topology_.hosts(); ++h) {
    in.input = of_host(call.input, h, call);
    in.output = scratch_ + static_cast<size_t>(h) * call.count * element_size(call.dtype);
    inside_.run(in, stream);
  }
  Call across = call;
  across.input = scratch_;
  sum_across(across, stream);
  inside_.look(stream);
}

void GpuAcrossHosts::all_gather(const Call& call, void* stream) {
  const size_t own = static_cast<size_t>(index_) * call.count * element_size(call.dtype);
  std::vector<Message> messages;
  for (int h = 0; h < topology_.hosts(); ++h) {
    if (h == host_) continue;
    messages.push_back({h, true, call.dtype, call.count, const_cast<std::byte*>(call.input), call.timeout});
    messages.push_back({h, false, call.dtype, call.count, of_host(call.output, h, call) + own, call.timeout});
  }
  messages_.exchange(messages, call.timeout, stream, word(stream));
  Call out = inside(call);
  for (int h = 0; h < topology_.hosts(); ++h) {
    out.output = of_host(call.output, h, call);
    out.input = h == host_ ? call.input : out.output + own;
    inside_.run(out, stream);
  }
}

void GpuAcrossHosts::gather(const Call& call, void* stream) {
  Call in = inside(call);
  in.output = rank_ == call.root ? of_host(call.output, host_, call) : leads(call) ? scratch_ : nullptr;
  inside_.run(in, stream);
  if (!leads(call)) return;
  move_across(call, call.output, stream);
  inside_.look(stream);
}

void GpuAcrossHosts::scatter(const Call& call, void* stream) {
  if (leads(call)) move_across(call, call.input, stream);
  Call out = inside(call);
  out.input = rank_ == call.root ? of_host(call.input, host_, call) : leads(call) ? scratch_ : nullptr;
  inside_.run(out, stream);
}

/// Between scratch on other hosts and the root's buffer, which has all blocks: each host's.
void GpuAcrossHosts::move_across(const Call& call, const std::byte* whole, void* stream) {
  const bool to_root = call.collective == Collective::gather;
  const size_t count = static_cast<size_t>(ranks_) * call.count;
  std::vector<Message> messages;
  if (rank_ != call.root) {
    messages.push_back({topology_.host(call.root), to_root, call.dtype, count, scratch_, call.timeout});
  }
  for (int h = 0; h < topology_.hosts() && rank_ == call.root; ++h) {
    if (h == host_) continue;
    messages.push_back({h, !to_root, call.dtype, count, of_host(whole, h, call), call.timeout});
  }
  messages_.exchange(messages, call.timeout, stream, word(stream));
}

/// As the ranks of this index call it.
void GpuAcrossHosts::sum_across(const Call& given, void* stream) {
  Call call = given;
  call.algorithm = nullptr;
  call.op = plain(given.op);
  if (NcclCollectives::serves(call)) {
    collectives_.run(call, stream, word(stream));
  } else {
    messages_.run(call, stream);
    communicator_->call("ncclAllReduce", word(stream), Deadline::after(call.timeout));
  }
  if (given.op == ReduceOp::avg && call.count > 0 && call.output != nullptr) divide(call.output, call, stream);
}

/// To all ranks of this index: whether a kernel of this rank's gave up, or ended because a peer's had. The second is
/// part of it also because what is heard is written where a peer told it.
NcclCommunicator::Act GpuAcrossHosts::word(void* stream) const {
  std::byte *said = scratch_ + kScratchBytes, *told = inside_.told_end();
  const std::byte* sources[] = {inside_.own_end(), told};
  ReduceArgs args{};
  args.dst = said;
  args.srcs = sources;
  args.n = 2;
  args.count = sizeof(uint64_t);
  check_device(device_, device_.reduce(&args, DType::uint8, ReduceOp::bor, stream), "looking how calls ended");
  return [said, told, stream](const NcclApi& api, NcclComm comm) {
    return api.all_reduce(said, told, sizeof(uint64_t), kNcclUint8, kNcclMax, comm, stream);
  };
}

void GpuAcrossHosts::divide(std::byte* values, const Call& call, void* stream) const {
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
