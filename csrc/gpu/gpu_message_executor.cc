#include "gpu/gpu_message_executor.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "base/partition.h"
#include "engine/call_layout.h"
#include "engine/selector.h"
#include "gpu/check_device.h"

namespace ringlet {
namespace {

constexpr size_t kPackBytes = 16;  // what the kernels load at once
constexpr size_t kSlotUnit = 256;

size_t remainder_of(const std::byte* address) { return reinterpret_cast<uintptr_t>(address) % kPackBytes; }

}  // namespace

std::string describe(const std::vector<Message>& messages) {
  std::string all;
  for (const Message& m : messages) {
    all += (all.empty() ? "" : ", ") + std::string(m.sending ? "send to" : "recv from") + " rank " +
           std::to_string(m.peer) + " (" + std::to_string(m.bytes()) + " bytes)";
  }
  return all;
}

/// The same piece of every chunk, so that segments never change which chunk an element belongs to.
struct GpuMessageExecutor::Segment {
  size_t begin;  // in every chunk
  size_t width;  // elements
  size_t set;    // of scratch
};

/// A round of a segment. Those of one group move together.
struct GpuMessageExecutor::Turn {
  size_t group;
  Segment segment;
  int round;
};

/// A call with its plan: where things lie and how it is cut.
struct GpuMessageExecutor::Bound {
  Bound(const Call& call, const GpuPlan& plan, const RankInfo& info)
      : call(call), plan(plan), layout(call, info, plan.parts), size(layout.element_bytes()) {}

  size_t elements(int chunk, const Segment& segment) const {
    return layout.elements(chunk, segment.begin, segment.width);
  }
  bool overlapped() const { return transfers != computing; }

  /// A chunk's slots lie as the chunk itself does, modulo 16: kernels then load and store packs.
  size_t skew(int chunk, const Segment& segment) const {
    if (layout.outputs().contains(chunk)) return remainder_of(layout.output(chunk, segment.begin));
    return layout.inputs().contains(chunk) ? remainder_of(layout.input(chunk, segment.begin)) : 0;
  }

  std::byte* slot(int number, int chunk, const Segment& segment) const {
    return scratch + (segment.set * slots + static_cast<size_t>(number)) * slot_bytes + skew(chunk, segment);
  }
  std::byte* address(Home home, int chunk, const Segment& segment) const {
    home = plan.found(home, chunk);
    if (home == Home::output) return layout.output(chunk, segment.begin);
    if (home == Home::input) return const_cast<std::byte*>(layout.input(chunk, segment.begin));
    return slot(plan.work[chunk], chunk, segment);
  }

  Segment segment(size_t index) const { return {index * width, width, index % sets}; }
  Segment whole() const { return {0, std::numeric_limits<size_t>::max(), 0}; }

  /// Of all segments, in the order in which all ranks take them: a segment begins a group later than the one before it,
  /// and moves in every other group, so that in between it can be reduced. Segments that lie two apart share groups.
  std::vector<Turn> turns() const {
    std::vector<Turn> all;
    const size_t stride = overlapped() ? 2 : 1;
    const size_t steps = plan.in_step ? static_cast<size_t>(plan.whole_from) : plan.rounds.size();
    const size_t apart = std::max(steps * stride, sets);  // a segment and the next one in the same slots
    for (size_t s = 0; s < segments; ++s) {
      const size_t start = s / sets * apart + s % sets;
      for (int r = 0; r < static_cast<int>(plan.rounds.size()) && plan.steps[r] < plan.whole_from; ++r)
        all.push_back({start + static_cast<size_t>(plan.steps[r]) * stride, segment(s), r});
    }
    std::stable_sort(all.begin(), all.end(), [](const Turn& a, const Turn& b) { return a.group < b.group; });
    return all;
  }

  const Call& call;
  const GpuPlan& plan;
  CallLayout layout;
  size_t size;
  std::byte* scratch = nullptr;
  size_t slots = 0;               // of a set
  size_t slot_bytes = kSlotUnit;  // enough for what is nothing but a meeting
  size_t width = 1;               // elements of a segment in every chunk
  size_t segments = 0;            // where nothing is cut there are none
  size_t sets = 1;                // in use
  NcclStream stream = nullptr, transfers = nullptr, computing = nullptr;
};

GpuMessageExecutor::GpuMessageExecutor(NcclCommunicator& communicator, const RingletCudaDevice& device,
                                       const Limits& limits, Selector selector)
    : communicator_(communicator),
      selector_(std::move(selector)),
      device_(device),
      limits_(limits),
      rank_(communicator.rank()),
      world_(communicator.world()),
      pointers_(static_cast<size_t>(device.most_sources)) {
  try {
    void* scratch = nullptr;
    check_device(device_, device_.allocate(&scratch, limits_.scratch_bytes), "allocating scratch");
    scratch_ = static_cast<std::byte*>(scratch);
    for (NcclStream* stream : {&transfers_, &computing_})
      check_device(device_, device_.create_stream(stream), "making a stream");
    for (void** event : {&moved_, &entered_, &done_})
      check_device(device_, device_.create_event(event), "making an event");
    for (void*& event : ready_) check_device(device_, device_.create_event(&event), "making an event");
  } catch (...) {
    release();
    throw;
  }
}

GpuMessageExecutor::~GpuMessageExecutor() { release(); }

void GpuMessageExecutor::release() noexcept {
  for (void* event : {moved_, entered_, done_, ready_[0], ready_[1], ready_[2], ready_[3]}) {
    if (event != nullptr) device_.destroy_event(event);
  }
  for (NcclStream stream : {transfers_, computing_}) {
    if (stream != nullptr) device_.destroy_stream(stream);
  }
  if (scratch_ != nullptr) device_.release(scratch_);
}

const Algorithm& GpuMessageExecutor::algorithm_for(const Call& call, bool nccls_own) const {
  if (call.algorithm != nullptr) return *call.algorithm;
  const size_t whole = buffer_bytes(call, world_);
  Situation situation{call.collective, whole, world_, /*in_place=*/false};
  situation.way = Way::nccl;
  situation.nccls_own = nccls_own;
  return selector_.choose(situation);
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
  cut(bound, bound.layout.longest_chunk());
  if (bound.sets > 1) {
    bound.transfers = transfers_;
    bound.computing = computing_;
  }
  return bound;
}

/// Into as few segments as scratch has room for and half of them can be reduced while the other half travels.
void GpuMessageExecutor::cut(Bound& bound, size_t longest) const {
  if (bound.plan.whole_from == 0 || longest == 0) return;
  const size_t slots = std::max<size_t>(1, bound.slots), bytes = longest * bound.size;
  const auto slot_of = [&](size_t width) { return round_up(width * bound.size + kPackBytes, kSlotUnit); };
  const auto room = [&](size_t sets) { return limits_.scratch_bytes / (sets * slots) / kSlotUnit * kSlotUnit; };
  size_t sets = bytes < 2 * limits_.least_segment_bytes ? 1 : bytes < 8 * limits_.least_segment_bytes ? 2 : kSets;
  if (!bound.plan.in_step) sets = 1;
  bound.width = std::min(ceil_div(longest, sets), limits_.most_segment_bytes / bound.size);
  if (slot_of(bound.width) > room(sets)) {
    sets = bound.plan.in_step ? 2 : 1;
    bound.width = std::min(bound.width, (std::max(room(sets), kSlotUnit) - kPackBytes) / bound.size);
  }
  bound.slot_bytes = slot_of(bound.width);
  if (bound.slot_bytes > room(sets)) {
    throw InvalidUsage(describe(bound.call) + " on a GPU needs at least " + std::to_string(sets * slots * kSlotUnit) +
                       " bytes of scratch, and the budget is " + std::to_string(limits_.scratch_bytes));
  }
  bound.segments = ceil_div(longest, bound.width);
  bound.sets = std::min(sets, bound.segments);
}

void GpuMessageExecutor::run(const Call& call, NcclStream stream) {
  communicator_.check();
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
  moving_ = false;
  std::fill(std::begin(fresh_), std::end(fresh_), false);
  if (bound.overlapped()) {
    check_device(device_, device_.record(entered_, bound.stream), "recording an event");
    for (NcclStream stream : {bound.transfers, bound.computing}) {
      check_device(device_, device_.wait(stream, entered_), "waiting for an event");
    }
  }
  const std::vector<Turn> turns = bound.turns();
  size_t begun = 0;
  for (auto turn = turns.begin(); turn != turns.end();) {
    const auto next = std::find_if(turn, turns.end(), [&](const Turn& t) { return t.group != turn->group; });
    for (; begun < bound.segments && begun * bound.width <= (next - 1)->segment.begin; ++begun)
      begin(bound, bound.segment(begun));
    run_together(bound, {turn, next});
    turn = next;
  }
  for (; begun < bound.segments; ++begun) begin(bound, bound.segment(begun));
  const Segment whole = bound.whole();
  if (bound.segments == 0) begin(bound, whole);
  if (bound.segments > 1) mark_ready(bound, whole);  // behind the arithmetic of all segments
  for (int r = 0; r < static_cast<int>(bound.plan.rounds.size()); ++r) {
    if (bound.plan.steps[r] >= bound.plan.whole_from) run_together(bound, {{0, whole, r}});
  }
  for (const int c : bound.plan.delivered) {
    if (!bound.plan.scaled) carry_input(bound, c, Home::output, whole);
  }
  catch_up(bound);
  order(bound, done_, bound.computing, bound.stream);
}

void GpuMessageExecutor::begin(const Bound& bound, const Segment& segment) {
  if (!bound.plan.scaled) return;
  for (int c = bound.plan.input.first; c < bound.plan.input.end(); ++c)
    carry_input(bound, c, bound.plan.target(c), segment);
  mark_ready(bound, segment);
}

void GpuMessageExecutor::run_together(const Bound& bound, const std::vector<Turn>& turns) {
  moving_ = transfer(bound, turns) || moving_;
  for (const Turn& turn : turns) {
    const auto combines = Plan::part(bound.plan.combines, bound.plan.rounds[turn.round].combines);
    const auto acts = [&](const Combine& one) { return bound.plan.acts(one); };
    if (std::none_of(combines.begin(), combines.end(), acts)) continue;
    catch_up(bound);
    for (const Combine& one : combines) {
      if (acts(one)) combine(bound, one, turn.segment);
    }
    mark_ready(bound, turn.segment);
  }
}

/// Arithmetic is behind all groups so far.
void GpuMessageExecutor::catch_up(const Bound& bound) {
  if (moving_) order(bound, moved_, bound.transfers, bound.computing);
  moving_ = false;
}

/// Who sends what the segment has waits for its arithmetic so far.
void GpuMessageExecutor::mark_ready(const Bound& bound, const Segment& segment) {
  if (!bound.overlapped()) return;
  check_device(device_, device_.record(ready_[segment.set], bound.computing), "recording an event");
  fresh_[segment.set] = true;
}

/// False where there is nothing to send or receive. Empty messages are left out on both sides.
bool GpuMessageExecutor::transfer(const Bound& bound, const std::vector<Turn>& turns) {
  bool any = false;
  communicator_.open_group();
  const auto send = [&](std::byte* from, size_t bytes, int peer) {
    if (bytes > 0) communicator_.send(from, bytes, peer, bound.transfers);
    any = any || bytes > 0;
  };
  const auto recv = [&](std::byte* to, size_t bytes, int peer) {
    if (bytes > 0) communicator_.recv(to, bytes, peer, bound.transfers);
    any = any || bytes > 0;
  };
  const GpuPlan& plan = bound.plan;
  for (const Turn& turn : turns) {
    const Segment& segment = turn.segment;
    int meeting = plan.meetings;
    for (const Transfer& sent : Plan::part(plan.sent, plan.rounds[turn.round].sent)) {
      if (sent.count == 0) send(bound.slot(meeting++, -1, segment), 1, sent.peer);
      for (int i = 0, c = sent.first; i < sent.count; ++i, ++c)
        send(bound.address(plan.sent_homes[sent.place + i], c, segment), bound.elements(c, segment) * bound.size,
             sent.peer);
    }
    for (const Transfer& received : Plan::part(plan.received, plan.rounds[turn.round].received)) {
      if (received.count == 0) recv(bound.slot(meeting++, -1, segment), 1, received.peer);
      for (int i = 0, c = received.first; i < received.count; ++i, ++c) {
        std::byte* const to = received.reduces ? bound.slot(plan.incoming[received.place + i], c, segment)
                                               : bound.address(plan.target(c), c, segment);
        recv(to, bound.elements(c, segment) * bound.size, received.peer);
      }
    }
  }
  if (!any) return false;
  for (const Turn& turn : turns) {
    if (!std::exchange(fresh_[turn.segment.set], false)) continue;
    check_device(device_, device_.wait(bound.transfers, ready_[turn.segment.set]), "waiting for an event");
  }
  communicator_.close_group(Deadline::after(bound.call.timeout));
  return true;
}

void GpuMessageExecutor::combine(const Bound& bound, const Combine& one, const Segment& segment) {
  const GpuPlan& plan = bound.plan;
  ReduceArgs args{};
  args.dst = bound.address(one.to, one.chunk, segment);
  args.n = one.sources;
  args.count = bound.elements(one.chunk, segment);
  args.divisor = one.finish && bound.call.op == ReduceOp::avg ? world_ : 1;
  for (int i = 0; i < one.sources; ++i) {
    const Source& source = plan.sources[one.first_source + i];
    pointers_[i] = source.message < 0 ? bound.address(source.home, source.chunk, segment)
                                      : bound.slot(plan.incoming[plan.place_of(source)], one.chunk, segment);
  }
  args.srcs = pointers_.data();
  move(bound, args, one.sources > 1);
}

/// As it is, or scaled.
void GpuMessageExecutor::carry_input(const Bound& bound, int chunk, Home to, const Segment& segment) {
  const std::byte* const from = bound.layout.input(chunk, segment.begin);
  ReduceArgs args{};
  args.dst = bound.address(to, chunk, segment);
  args.srcs = &from;
  args.n = 1;
  args.count = bound.elements(chunk, segment);
  args.scaled_source = bound.plan.scaled ? 0 : -1;
  args.scale = bound.call.scale;
  move(bound, args, bound.plan.scaled);
}

void GpuMessageExecutor::move(const Bound& bound, const ReduceArgs& args, bool reduces) {
  if (args.count == 0) return;
  if (reduces) {
    check_device(device_, device_.reduce(&args, bound.call.dtype, bound.call.op, bound.computing), "a reduction");
  } else if (args.dst != args.srcs[0]) {
    check_device(device_, device_.copy(args.dst, args.srcs[0], args.count * bound.size, bound.computing), "a copy");
  }
}

void GpuMessageExecutor::order(const Bound& bound, void* event, NcclStream before, NcclStream after) {
  if (!bound.overlapped()) return;
  check_device(device_, device_.record(event, before), "recording an event");
  check_device(device_, device_.wait(after, event), "waiting for an event");
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

}  // namespace ringlet
