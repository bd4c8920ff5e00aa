#include "gpu/gpu_message_executor.h"

#include <algorithm>
#include <utility>

#include "base/partition.h"
#include "engine/call_layout.h"
#include "engine/selector.h"

namespace ringlet {
namespace {

constexpr size_t kPackBytes = 16;  // what the kernels load at once
constexpr size_t kSlotUnit = 256;

size_t remainder_of(const std::byte* address) { return reinterpret_cast<uintptr_t>(address) % kPackBytes; }

/// "send to rank 1 (4000 bytes), recv from rank 2 (4000 bytes)"
std::string describe(const std::vector<Message>& messages) {
  std::string all;
  for (const Message& m : messages) {
    all += (all.empty() ? "" : ", ") + std::string(m.sending ? "send to" : "recv from") + " rank " +
           std::to_string(m.peer) + " (" + std::to_string(m.bytes()) + " bytes)";
  }
  return all;
}

}  // namespace

/// The same piece of every chunk, so that segments never change which chunk an element belongs to.
struct GpuMessageExecutor::Segment {
  size_t begin;  // in every chunk
  size_t set;    // of scratch
};

/// A call with its plan: where things lie and how it is cut.
struct GpuMessageExecutor::Bound {
  Bound(const Call& call, const GpuPlan& plan, const RankInfo& info)
      : call(call), plan(plan), layout(call, info, plan.parts), size(layout.element_bytes()) {}

  size_t elements(int chunk, const Segment& segment) const { return layout.elements(chunk, segment.begin, width); }
  size_t bytes(int chunk, const Segment& segment) const {
    return chunk == kNoChunk ? 1 : elements(chunk, segment) * size;
  }
  bool overlapped() const { return transfers != computing; }

  /// A chunk's slots lie as the chunk itself does, modulo 16: kernels then load and store packs.
  size_t skew(int chunk, const Segment& segment) const {
    if (layout.outputs().contains(chunk)) return remainder_of(layout.output(chunk, segment.begin));
    return layout.inputs().contains(chunk) ? remainder_of(layout.input(chunk, segment.begin)) : 0;
  }

  std::byte* address(Location location, const Segment& segment) const {
    if (location.residence == Residence::output) return layout.output(location.chunk, segment.begin);
    if (location.residence == Residence::input)
      return const_cast<std::byte*>(layout.input(location.chunk, segment.begin));
    const size_t slot =
        static_cast<size_t>(location.residence == Residence::work ? location.slot : plan.work_slots + location.slot);
    return scratch + (segment.set * slots + slot) * slot_bytes + skew(location.chunk, segment);
  }

  const Call& call;
  const GpuPlan& plan;
  CallLayout layout;
  size_t size;
  std::byte* scratch = nullptr;
  size_t slots = 0;  // of a set
  size_t slot_bytes = 0;
  size_t width = 1;  // elements of a segment in every chunk
  size_t segments = 1;
  size_t sets = 1;  // in use
  NcclStream stream = nullptr, transfers = nullptr, computing = nullptr;
};

GpuMessageExecutor::GpuMessageExecutor(NcclCommunicator& communicator, const RingletCudaDevice& device,
                                       const Limits& limits, Selector selector, std::optional<Topology> topology)
    : communicator_(communicator),
      selector_(std::move(selector)),
      topology_(std::move(topology)),
      device_(device),
      limits_(limits),
      rank_(communicator.rank()),
      world_(communicator.world()),
      pointers_(static_cast<size_t>(device.most_sources)) {
  try {
    void* scratch = nullptr;
    device_call(device_.allocate(&scratch, limits_.scratch_bytes), "allocating scratch");
    scratch_ = static_cast<std::byte*>(scratch);
    for (NcclStream* stream : {&transfers_, &computing_}) device_call(device_.create_stream(stream), "making a stream");
    for (void** event : {&moved_[0], &moved_[1], &ready_[0], &ready_[1], &entered_, &done_}) {
      device_call(device_.create_event(event), "making an event");
    }
  } catch (...) {
    release();
    throw;
  }
}

GpuMessageExecutor::~GpuMessageExecutor() { release(); }

void GpuMessageExecutor::release() noexcept {
  for (void* event : {moved_[0], moved_[1], ready_[0], ready_[1], entered_, done_}) {
    if (event != nullptr) device_.destroy_event(event);
  }
  for (NcclStream stream : {transfers_, computing_}) {
    if (stream != nullptr) device_.destroy_stream(stream);
  }
  if (scratch_ != nullptr) device_.release(scratch_);
}

void GpuMessageExecutor::check_call(const Call& call) const {
  const auto refuse = [&](const std::string& why) { throw InvalidUsage(describe(call) + " on a GPU: " + why); };
  if (call.root < 0 || call.root >= world_) refuse("no rank " + std::to_string(call.root) + " to be the root");
  if (is_reduction(call.collective) && !supports(call.dtype, call.op)) {
    refuse(std::string(name(call.op)) + " is not defined on " + name(call.dtype));
  }
  if (call.blocks != nullptr) return;
  if (input_elements(call, rank_, world_) != 0 && call.input == nullptr) refuse("this rank needs an input");
  if (output_elements(call, rank_, world_) != 0 && call.output == nullptr) refuse("this rank needs an output");
}

RankInfo GpuMessageExecutor::place(int root) const { return {rank_, world_, root, topology_ ? &*topology_ : nullptr}; }

const Algorithm& GpuMessageExecutor::algorithm_for(const Call& call) const {
  if (call.algorithm != nullptr) return *call.algorithm;
  const size_t whole = buffer_bytes(call, world_);
  const int hosts = topology_ ? topology_->hosts() : 1;
  return selector_.choose({call.collective, whole, world_, /*in_place=*/false, hosts > 1, hosts < world_, Way::nccl});
}

const GpuPlan& GpuMessageExecutor::plan_for(const Algorithm& algorithm, const Call& call) {
  const bool scaled = is_reduction(call.collective) && call.op == ReduceOp::premul_sum;
  const auto index = static_cast<uint64_t>(index_of(algorithm));
  std::unique_ptr<GpuPlan>& plan = plans_[index << 33 | uint64_t{scaled} << 32 | static_cast<uint32_t>(call.root)];
  if (!plan) plan = std::make_unique<GpuPlan>(make_gpu_plan(algorithm, place(call.root), scaled));
  if (plan->most_sources > device_.most_sources) {
    throw InvalidUsage(std::string(algorithm.name) + " combines " + std::to_string(plan->most_sources) +
                       " values at once, and the GPU's kernels " + std::to_string(device_.most_sources) +
                       " at most; choose another algorithm for a world of " + std::to_string(world_));
  }
  return *plan;
}

GpuMessageExecutor::Bound GpuMessageExecutor::bind(const Call& call, const GpuPlan& plan, NcclStream stream) const {
  Bound bound(call, plan, place(call.root));
  bound.scratch = scratch_;
  bound.stream = bound.transfers = bound.computing = stream;
  bound.slots = static_cast<size_t>(plan.slots);
  if (call.blocks != nullptr && call.collective == Collective::all_to_all && plan.slots != 0) {
    throw InvalidUsage(
        describe(call) +
        " on a GPU: no rank knows all blocks' lengths, so none can say how to cut them; choose pairwise");
  }
  const size_t longest = bound.layout.longest_chunk();
  const size_t room = limits_.scratch_bytes / (kSets * std::max<size_t>(1, bound.slots)) / kSlotUnit * kSlotUnit;
  bound.slot_bytes = std::min(room, round_up(limits_.segment_bytes + kPackBytes, kSlotUnit));
  if (bound.slot_bytes < kSlotUnit) {
    throw InvalidUsage(describe(call) + " on a GPU needs at least " + std::to_string(kSets * bound.slots * kSlotUnit) +
                       " bytes of scratch, and the budget is " + std::to_string(limits_.scratch_bytes));
  }
  bound.width = bound.slots == 0 ? std::max<size_t>(1, longest) : (bound.slot_bytes - kPackBytes) / bound.size;
  bound.segments = std::max<size_t>(1, ceil_div(longest, bound.width));
  if (bound.segments > 1 && plan.in_step) {
    bound.sets = kSets;
    bound.transfers = transfers_;
    bound.computing = computing_;
  }
  return bound;
}

void GpuMessageExecutor::run(const Call& call, NcclStream stream) {
  communicator_.check();
  check_call(call);
  const Algorithm& algorithm = algorithm_for(call);
  const Bound bound = bind(call, plan_for(algorithm, call), stream);
  last_ = describe(call, &algorithm);
  try {
    enqueue(bound);
  } catch (const Error& error) {
    communicator_.abort();  // the peers would wait for what this rank will not send
    rethrow(error.kind(), last_ + " on rank " + std::to_string(rank_) + ": " + error.what());
  }
}

void GpuMessageExecutor::enqueue(const Bound& bound) {
  if (bound.overlapped()) {
    device_call(device_.record(entered_, bound.stream), "recording an event");
    for (NcclStream stream : {bound.transfers, bound.computing}) {
      device_call(device_.wait(stream, entered_), "waiting for an event");
    }
  }
  for (size_t first = 0; first < bound.segments; first += bound.sets) {
    std::vector<Segment> segments;
    for (size_t s = 0; s < bound.sets && first + s < bound.segments; ++s)
      segments.push_back({(first + s) * bound.width, s});
    for (const Segment& segment : segments) begin(bound, segment);
    // In this order on all ranks, whichever rounds they have: those that meet are of one step, and of one segment.
    for (const GpuRound& round : bound.plan.rounds) {
      for (const Segment& segment : segments) run_round(bound, round, segment);
    }
    for (const Segment& segment : segments) {
      for (const GpuCombine& copy : bound.plan.deliver) combine(bound, copy, segment, false);
    }
  }
  // Arithmetic waits for every group, so its stream is the last to be done.
  order(bound, done_, bound.computing, bound.stream);
}

void GpuMessageExecutor::begin(const Bound& bound, const Segment& segment) {
  for (const GpuCombine& own : bound.plan.scale) combine(bound, own, segment, true);
  if (bound.overlapped()) device_call(device_.record(ready_[segment.set], bound.computing), "recording an event");
}

void GpuMessageExecutor::run_round(const Bound& bound, const GpuRound& round, const Segment& segment) {
  if (transfer(bound, round, segment)) order(bound, moved_[segment.set], bound.transfers, bound.computing);
  for (const GpuCombine& item : round.combines) combine(bound, item, segment, false);
  if (bound.overlapped()) device_call(device_.record(ready_[segment.set], bound.computing), "recording an event");
}

/// False where there is nothing to send or receive. Empty messages are left out on both sides.
bool GpuMessageExecutor::transfer(const Bound& bound, const GpuRound& round, const Segment& segment) {
  const auto any = [&](const std::vector<GpuTransfer>& transfers) {
    return std::any_of(transfers.begin(), transfers.end(),
                       [&](const GpuTransfer& t) { return bound.bytes(t.location.chunk, segment) != 0; });
  };
  if (!any(round.sends) && !any(round.receives)) return false;
  if (bound.overlapped()) device_call(device_.wait(bound.transfers, ready_[segment.set]), "waiting for an event");
  communicator_.open_group();
  for (const GpuTransfer& t : round.sends) {
    const size_t bytes = bound.bytes(t.location.chunk, segment);
    if (bytes != 0) communicator_.send(bound.address(t.location, segment), bytes, t.peer, bound.transfers);
  }
  for (const GpuTransfer& t : round.receives) {
    const size_t bytes = bound.bytes(t.location.chunk, segment);
    if (bytes != 0) communicator_.recv(bound.address(t.location, segment), bytes, t.peer, bound.transfers);
  }
  communicator_.close_group(Deadline::after(bound.call.timeout));
  return true;
}

void GpuMessageExecutor::combine(const Bound& bound, const GpuCombine& item, const Segment& segment, bool scale) {
  const Call& call = bound.call;
  ReduceArgs args{};
  args.dst = bound.address(item.to, segment);
  args.srcs = pointers_.data();
  args.n = item.sources;
  args.count = bound.elements(item.to.chunk, segment);
  args.divisor = item.finish && call.op == ReduceOp::avg ? world_ : 1;
  if (scale) {
    args.scaled_source = 0;
    args.scale = call.scale;
  }
  for (int i = 0; i < item.sources; ++i) {
    pointers_[i] = bound.address(bound.plan.sources[item.first_source + i], segment);
  }
  if (args.count == 0) return;
  if (item.sources > 1 || scale) {
    device_call(device_.reduce(&args, call.dtype, call.op, bound.computing), "a reduction");
  } else if (args.dst != pointers_[0]) {
    device_call(device_.copy(args.dst, pointers_[0], args.count * bound.size, bound.computing), "a copy");
  }
}

void GpuMessageExecutor::order(const Bound& bound, void* event, NcclStream before, NcclStream after) {
  if (!bound.overlapped()) return;
  device_call(device_.record(event, before), "recording an event");
  device_call(device_.wait(after, event), "waiting for an event");
}

void GpuMessageExecutor::exchange(const std::vector<Message>& messages, std::chrono::milliseconds timeout,
                                  NcclStream stream) {
  communicator_.check();
  last_ = describe(messages);
  try {
    communicator_.open_group();
    for (const Message& m : messages) {
      if (m.bytes() == 0) continue;  // left out on both sides
      if (m.sending) {
        communicator_.send(m.data, m.bytes(), m.peer, stream);
      } else {
        communicator_.recv(m.data, m.bytes(), m.peer, stream);
      }
    }
    communicator_.close_group(Deadline::after(timeout));
  } catch (const Error& error) {
    communicator_.abort();
    rethrow(error.kind(), last_ + " on rank " + std::to_string(rank_) + ": " + error.what());
  }
}

void GpuMessageExecutor::device_call(int code, const char* what) const {
  if (code != 0) throw DeviceError(std::string(what) + ": " + device_.explain(code));
}

}  // namespace ringlet
