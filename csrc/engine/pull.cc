#include "engine/pull.h"

#include <algorithm>

#include "base/partition.h"

namespace ringlet {
namespace {

// A slab and its stages stay in a core's second-level cache; in place, where nothing is staged, a slab may be larger.
constexpr size_t kStagedSlabBytes = size_t{256} << 10;
constexpr size_t kInPlaceSlabBytes = size_t{1} << 20;
// Results of messages this large are not in the cache any more when the caller reads them.
constexpr size_t kStreamingBytes = size_t{8} << 20;
// Two epochs that count as complete before the first: flow control needs no special case.
constexpr uint64_t kFirstEpoch = 2;

}  // namespace

/// Where the chunks of the slab in progress lie.
struct PullEngine::Slab {
  Slab(const Call& call, const Plan& plan, size_t begin, size_t count)
      : divided(is_divided(call.collective)),
        size(element_size(call.dtype)),
        block(call.count),
        begin(begin),
        count(count),
        partition(count, static_cast<size_t>(plan.parts)) {}

  size_t in_tensor(int chunk) const { return (begin + (divided ? partition.offset(chunk) : chunk * block)) * size; }
  size_t in_stage(int chunk) const { return (divided ? partition.offset(chunk) : chunk * count) * size; }
  size_t elements(int chunk, int chunks) const {
    return divided ? partition.offset(chunk + chunks) - partition.offset(chunk) : count * static_cast<size_t>(chunks);
  }

  bool divided;
  size_t size;
  size_t block;  // elements of a chunk in a blocked tensor
  size_t begin;
  size_t count;
  Partition partition;
  int parity = 0;
  bool tiny = false;
};

PullEngine::PullEngine(Transport& transport, Waiter& waiter)
    : transport_(transport),
      waiter_(waiter),
      rank_(transport.rank()),
      world_(transport.world()),
      epoch_(kFirstEpoch - 1),
      seen_(world_, 0),
      quick_(2 * algorithms().size(), nullptr),
      inputs_(world_),
      outputs_(world_) {
  transport_.control().presence.store(static_cast<uint32_t>(Presence::present), std::memory_order_relaxed);
  transport_.control().progress.store(at(kFirstEpoch, 0), std::memory_order_release);
}

void PullEngine::run(const Call& call, bool patient) {
  waiter_.raise_if_failed();
  patient_ = patient;
  call_ = &call;
  slab_index_ = 0;
  slabs_ = 1;
  comparing_ = false;
  const size_t size = element_size(call.dtype);
  const bool divided = is_divided(call.collective);
  const size_t whole = call.count * size * (divided ? 1 : static_cast<size_t>(world_));
  const bool small = whole <= kSmallBytes;
  const bool registered = !small && call.op != ReduceOp::premul_sum &&
                          transport_.locate(call.input, input_elements(call, rank_, world_) * size).has_value() &&
                          transport_.locate(call.output, output_elements(call, rank_, world_) * size).has_value();
  first_epoch_ = epoch_ + 1;
  begin_epoch();
  announce(call, registered);
  comparing_ = true;
  const bool in_place = !small && agree_on_place();
  const Plan& plan = plan_for(call, in_place);
  bind(plan, in_place);
  streaming_ = whole >= kStreamingBytes;

  const size_t limit = in_place && !plan.uses_stage ? kInPlaceSlabBytes : kStagedSlabBytes;
  const size_t unit = size * (divided ? 1 : static_cast<size_t>(plan.parts));
  const size_t step = std::max<size_t>(1, limit / unit);
  slabs_ = std::max<size_t>(1, ceil_div(call.count, step));
  for (size_t begin = 0; slab_index_ < slabs_; ++slab_index_, begin += step) {
    if (slab_index_ > 0) begin_epoch();
    run_slab(plan, begin, std::min(step, call.count - begin), slab_index_ + 1 == slabs_);
  }
  call_ = nullptr;
}

void PullEngine::begin_epoch() {
  ++epoch_;
  for (int q = 0; q < world_; ++q) {
    if (q != rank_ && seen_[q] < at(epoch_ - 1, 0)) wait_for(q, at(epoch_ - 1, 0));
  }
}

void PullEngine::announce(const Call& call, bool registered) {
  announcement_ = {signature_of(call, registered), call.count};
  Control& control = transport_.control();
  control.calls[epoch_ & 1] = announcement_;
  AnnouncementDetail& detail = control.details[epoch_ & 1];
  detail.sequence = call.sequence;
  if (registered) {
    detail.input = transport_.locate(call.input, 0).value_or(0);
    detail.output = transport_.locate(call.output, 0).value_or(0);
  }
}

/// Whether all ranks' tensors are registered: the same answer on every rank.
bool PullEngine::agree_on_place() {
  publish(at(epoch_, kAnnounced));
  bool all = registered_in(announcement_.signature);
  for (int i = 1; i < world_; ++i) {
    const int q = (rank_ + i) % world_;
    wait_for(q, at(epoch_, kAnnounced));
    all = all && registered_in(transport_.control(q).calls[epoch_ & 1].signature);
  }
  return all;
}

const Plan& PullEngine::plan_for(const Call& call, bool in_place) {
  const size_t quick = 2 * static_cast<size_t>(index_of(*call.algorithm)) + (in_place ? 1 : 0);
  if (call.root == 0 && quick_[quick] != nullptr) return *quick_[quick];
  std::unique_ptr<Plan>& plan = plans_[quick << 32 | static_cast<uint32_t>(call.root)];
  if (!plan) {
    plan = std::make_unique<Plan>(make_plan(*call.algorithm, {rank_, world_, call.root}, in_place));
    pointers_.resize(std::max(pointers_.size(), static_cast<size_t>(plan->most_sources)));
  }
  if (call.root == 0) quick_[quick] = plan.get();
  return *plan;
}

void PullEngine::bind(const Plan& plan, bool in_place) {
  const Call& call = *call_;
  if (is_reduction(call.collective)) {
    kernel_ = reduce_kernel(call.dtype, call.op);
    divisor_ = call.op == ReduceOp::avg ? world_ : 1;
  }
  // A blocked tensor's first chunk need not be chunk 0 of the schedule; pointers are moved so that chunk c is at c blocks.
  const size_t block = is_divided(call.collective) ? 0 : call.count * element_size(call.dtype);
  const auto moved = [&](const std::byte* pointer, int first) {
    return reinterpret_cast<const std::byte*>(reinterpret_cast<uintptr_t>(pointer) - static_cast<size_t>(first) * block);
  };
  for (int q = 0; q < world_; ++q) {
    if (q != rank_ && !in_place) continue;
    const Place place{q, world_, call.root};
    const AnnouncementDetail& detail = transport_.control(q).details[first_epoch_ & 1];
    const std::byte* input = q == rank_ ? call.input : transport_.link(q).base + detail.input;
    const std::byte* output = q == rank_ ? call.output : transport_.link(q).base + detail.output;
    inputs_[q] = moved(input, input_chunks(call.collective, place, plan.parts).first);
    outputs_[q] = moved(output, output_chunks(call.collective, place, plan.parts).first);
  }
}

void PullEngine::run_slab(const Plan& plan, size_t begin, size_t count, bool last) {
  Slab slab(*call_, plan, begin, count);
  slab.parity = static_cast<int>(epoch_ & 1);
  slab.tiny = plan.parts == 1 && count * slab.size <= Control::kTinyBytes;
  const size_t end = last ? plan.steps.size() : plan.body;
  for (size_t i = 0; i < end; ++i) {
    const PlanStep& step = plan.steps[i];
    switch (step.kind) {
      case PlanStep::Kind::publish:
        if (step.stage == kCompleted) comparing_ = false;  // from here on peers may announce their next call but one
        publish(at(epoch_, step.stage));
        break;
      case PlanStep::Kind::wait: wait_for(step.peer, at(epoch_, step.stage)); break;
      case PlanStep::Kind::combine: combine(plan, step, slab); break;
    }
  }
}

void PullEngine::combine(const Plan& plan, const PlanStep& step, const Slab& slab) {
  const auto stage = [&](int rank, Space space) -> const std::byte* {
    const int index = space == Space::stage_a ? 0 : 1;
    if (slab.tiny && index == 0) return transport_.control(rank).tiny[slab.parity];
    return transport_.link(rank).region + transport_.layout().stage(slab.parity, index);
  };
  const auto address = [&](int rank, Space space, int chunk) {
    if (space == Space::input) return inputs_[rank] + slab.in_tensor(chunk);
    if (space == Space::output) return outputs_[rank] + slab.in_tensor(chunk);
    return stage(rank, space) + slab.in_stage(chunk);
  };
  // Chunks of a blocked tensor lie apart, so they are taken one by one; a divided one's are neighbours.
  const int stride = slab.divided ? step.chunks : 1;
  for (int c = 0; c < step.chunks; c += stride) {
    const size_t elements = slab.elements(step.chunk + c, stride);
    if (elements == 0) continue;
    ReduceArgs args{};
    args.dst = const_cast<std::byte*>(address(rank_, step.to, step.chunk + c));
    args.dst2 = step.tee ? const_cast<std::byte*>(address(rank_, Space::output, step.chunk + c)) : nullptr;
    args.n = step.sources;
    args.srcs = pointers_.data();
    args.count = elements;
    args.scaled_source = -1;
    args.scale = call_->scale;
    args.divisor = step.finish ? divisor_ : 1;
    args.streaming = streaming_ && !step.read_later && !step.tee;
    for (int i = 0; i < step.sources; ++i) {
      const Source& source = plan.sources[step.first_source + i];
      pointers_[i] = address(source.rank, source.space, source.chunk + c);
      if (source.raw && source.rank == rank_ && call_->op == ReduceOp::premul_sum) args.scaled_source = i;
    }
    const bool plain = step.sources == 1 && args.scaled_source < 0 && args.divisor == 1;
    if (!plain) {
      kernel_(args);
      continue;
    }
    if (pointers_[0] != args.dst) copy_bytes(args.dst, pointers_[0], elements * slab.size, args.streaming);
    if (step.tee) copy_bytes(args.dst2, args.dst, elements * slab.size, streaming_);
  }
}

void PullEngine::publish(uint64_t value) {
  Control& control = transport_.control();
  control.progress.store(value, std::memory_order_release);
  for (int q = 0; q < world_; ++q) {
    // Lines that change only when someone falls asleep: they stay in this core's cache.
    if (transport_.control(q).sleeping_on.load(std::memory_order_relaxed) == 1 + static_cast<uint32_t>(rank_)) {
      wake_all(control.progress);
      break;
    }
  }
}

void PullEngine::wait_for(int peer, uint64_t target) {
  const std::atomic<uint64_t>& progress = transport_.control(peer).progress;
  if (progress.load(std::memory_order_acquire) < target && !waiter_.spin(progress, target, patient_)) {
    wait_slowly(peer, target);
  }
  seen_[peer] = progress.load(std::memory_order_acquire);
  if (comparing_) compare(peer);
}

void PullEngine::compare(int peer) {
  const Control& control = transport_.control(peer);
  const Announcement& theirs = control.calls[first_epoch_ & 1];
  if (same_call(theirs, announcement_)) [[likely]] return;
  waiter_.fail(ErrorKind::invalid_usage,
               "calls do not match: rank " + std::to_string(rank_) + " is in " + describe(announcement_, call_->sequence) +
                   ", rank " + std::to_string(peer) + " is in " +
                   describe(theirs, control.details[first_epoch_ & 1].sequence) +
                   "; all ranks of a group must make the same calls in the same order");
}

void PullEngine::wait_slowly(int peer, uint64_t target) {
  const std::atomic<uint64_t>& progress = transport_.control(peer).progress;
  Waiting waiting;
  waiting.peer = peer;
  waiting.timeout = call_ != nullptr ? call_->timeout : std::chrono::milliseconds(0);
  waiting.reached = [&] { return progress.load(std::memory_order_acquire) >= target; };
  waiting.sleep = [&](int64_t nanoseconds) {
    const uint64_t value = progress.load(std::memory_order_acquire);
    if (value < target) sleep_on(progress, value, nanoseconds);
  };
  // A peer in another call may never come to where this rank waits for it; what it announced tells at once.
  waiting.check = [&] {
    const uint64_t value = progress.load(std::memory_order_acquire);
    if (comparing_ && value > at(first_epoch_, 0)) compare(peer);
  };
  waiting.story = [&] {
    const uint32_t stage = static_cast<uint32_t>(target - at(epoch_, 0));
    const bool in_round = target >= at(epoch_, ready(0)) && stage < kCompleted;
    return story() + (in_round ? ", round " + std::to_string(stage - ready(0)) : ", at its start");
  };
  waiter_.wait(waiting);
}

std::string PullEngine::story() const {
  std::string text = "rank " + std::to_string(rank_) + " of " + std::to_string(world_);
  if (call_ == nullptr) return text;
  text += " in " + describe(announcement_, call_->sequence);
  const size_t bytes = call_->count * element_size(call_->dtype);
  return text + ", " + std::to_string(bytes * slab_index_ / slabs_) + " of " + std::to_string(bytes) + " bytes done";
}

bool PullEngine::quiesce(std::chrono::milliseconds timeout) {
  const Deadline deadline = Deadline::after(timeout);
  for (int q = 0; q < world_; ++q) {
    const std::atomic<uint64_t>& progress = transport_.control(q).progress;
    for (uint64_t value; (value = progress.load(std::memory_order_acquire)) < at(epoch_ + 1, 0);) {
      const bool gone = transport_.control(q).presence.load() == static_cast<uint32_t>(Presence::left) || !transport_.alive(q);
      if (gone || deadline.passed()) return false;
      sleep_on(progress, value, 1'000'000);
    }
  }
  return true;
}

}  // namespace ringlet
