#include "engine/pull/pull_executor.h"

#include <algorithm>
#include <iterator>

#include "base/partition.h"
#include "engine/pull/peer_reads.h"

namespace ringlet {
namespace {

// Ranks that share a processor pay for each wait with a round of context switches, so they use fewer, larger segments.
constexpr size_t kStagedSegmentBytesInTurns = size_t{1} << 20;  ///< a segment, with staging buffers, if ranks outnumber
                                                                ///< processors
// Two epochs count as complete before the first epoch, so flow control has no special case at the start.
constexpr uint64_t kFirstEpoch = 2;

}  // namespace

PullExecutor::PullExecutor(Transport& transport, Waiter& waiter, const Selector& selector)
    : transport_(transport),
      waiter_(waiter),
      health_(waiter.health()),
      selector_(selector),
      tuning_(selector.tuning()),
      rank_(transport.rank()),
      world_(transport.world()),
      epoch_(kFirstEpoch - 1),
      seen_(world_, 0),
      quick_(2 * algorithms().size(), nullptr),
      inputs_(world_),
      outputs_(world_),
      call_trials_(selector) {
  transport_.control().progress.store(at(kFirstEpoch, 0), std::memory_order_release);
}

void PullExecutor::run(const Call& call, bool background) {
  patience_ = Patience::unlimited;
  background_ = background;
  advance_all(call, /*first=*/true);
}

bool PullExecutor::advance(const Call& call, bool spin, Awaited* awaited) {
  patience_ = spin ? Patience::spin : Patience::none;
  background_ = false;
  if (advance_all(call, call_ != &call)) return true;
  if (awaited != nullptr) *awaited = awaited_;
  return false;
}

bool PullExecutor::advance_all(const Call& call, bool first) {
  try {
    if (first) begin(call);
    return proceed();
  } catch (const Error&) {
    call_ = nullptr;
    throw;
  } catch (...) {  // such as bad_alloc, when peers may read this rank's tensors already
    call_ = nullptr;
    health_.poison_in_flight([&] { return describe(call); });
    throw;
  }
}

void PullExecutor::begin(const Call& call) {
  // One peer a call: its page is in the cache.
  if (++looked_at_ >= world_) looked_at_ = 0;
  if (looked_at_ == rank_ && ++looked_at_ >= world_) looked_at_ = 0;
  if (transport_.control(looked_at_).failed.load(std::memory_order_relaxed) != 0) [[unlikely]]
    health_.look();
  health_.enter_call();
  call_ = &call;
  segment_index_ = 0;
  segments_ = 1;
  comparing_ = false;
  plan_ = nullptr;
  held_up_.reset();
  const size_t whole = buffer_bytes(call, world_);
  small_ = whole <= tuning_.small(world_);
  streaming_ = whole >= tuning_.streaming_bytes;
  // Ranks that share a processor share its cache, so no result needs to be moved to another core.
  hands_over_ = whole <= tuning_.hand_over_bytes && !transport_.oversubscribed();
  timed_ = nullptr;
  trials_ = trials_of(call, whole);
  meets_ = !small_ || (trials_ != nullptr && trials_->trials[CallTrials::kStaged].is_trying_next());
  agreed_ = !small_ && readable_in_place(call);  // this rank, so far
  previous_ = signature_;
  signature_ = {signature_of(call, agreed_, history_), signature_count(call)};
  history_ = history_after(history_, signature_);
  health_.calls().begin(signature_, call.sequence);
  begin_epoch(Phase::first_epoch);
  first_epoch_ = epoch_;
}

CallTrials* PullExecutor::trials_of(const Call& call, size_t bytes) {
  const bool tries = world_ == 2 && hands_over_ && !streaming_ &&
                     bytes >= std::max(AllCallTrials::kLeastBytes, tuning_.timed_copy_bytes);
  return tries ? &call_trials_.of(call.collective, bytes, call.algorithm != nullptr) : nullptr;
}

/// Continues the call in progress. Returns false if it must wait for a peer and patience_ does not allow the wait.
bool PullExecutor::proceed() {
  while (true) {
    switch (phase_) {
      case Phase::first_epoch:
        if (!peers_completed()) return false;
        publish_signature();
        comparing_ = true;
        if (!meets_) {
          choose(false);
        } else {
          publish(at(epoch_, kSignatureReady));
          next_ = 1;
          phase_ = Phase::agreement;
        }
        break;
      case Phase::agreement:
        if (!peers_agree()) return false;
        choose(agreed_);
        break;
      case Phase::next_epoch:
        if (!peers_completed()) return false;
        take_stages();
        break;
      case Phase::steps:
        if (!run_segment()) return false;
        if (++segment_index_ == segments_) {
          if (timed_ != nullptr) [[unlikely]] {
            const std::chrono::duration<double, std::nano> taken = Deadline::Clock::now() - began_;
            timed_->took(taken.count() / static_cast<double>(buffer_bytes(*call_, world_)));
          }
          staging_trials_.end();
          call_ = nullptr;
          health_.calls().end();
          return true;
        }
        segment_->begin += segment_->width;
        if (patience_ == Patience::unlimited) health_.check_interrupts([&] { return context(); });
        begin_epoch(Phase::next_epoch);
        break;
    }
  }
}

/// The way of this call. All ranks are there, if its trial is due.
CallTrials::Way PullExecutor::take_way(CallTrials& trials, bool readable) {
  const int kind = readable ? CallTrials::kInPlace : CallTrials::kStaged;
  Trial& trial = trials.trials[static_cast<size_t>(kind)];
  if (trial.is_due()) {
    Trial::Costs slowest = trial.costs();
    for (int q = 0; q < world_; ++q) {
      const Trial::Costs& theirs = transport_.control(q).details[first_epoch_ & 1].costs[kind];
      for (size_t way = 0; way < slowest.size(); ++way) slowest[way] = std::max(slowest[way], theirs[way]);
    }
    trial.decide(slowest);
  }
  if (trial.times()) {
    timed_ = &trial;
    began_ = Deadline::Clock::now();
  }
  return trials.way(readable);
}

/// Decides how to carry out the call. All ranks decide alike. `readable`: in place, too.
void PullExecutor::choose(bool readable) {
  const Call& call = *call_;
  CallTrials::Way way{.in_place = readable, .other_algorithm = false};
  if (trials_ != nullptr) way = take_way(*trials_, readable);
  const Algorithm& first = call.algorithm != nullptr ? *call.algorithm : chosen_for(call, way.in_place);
  const Algorithm& algorithm = way.other_algorithm ? AllCallTrials::other(first) : first;
  try {
    plan_ = &plan_for(algorithm, call.root, way.in_place);
  } catch (const InvalidUsage&) {  // on all ranks alike: the epoch is over, and later calls count on that
    comparing_ = false;
    publish(at(epoch_, kCompleted));
    throw;
  }
  segment_.emplace(call, RankInfo{rank_, world_, call.root}, plan_->parts);
  const CallLayout& layout = segment_->layout;
  bind();
  const size_t limit = segment_limit();
  segment_->width = std::max<size_t>(1, limit / (layout.element_bytes() * static_cast<size_t>(plan_->parts)));
  segments_ = std::max<size_t>(1, ceil_div(layout.longest_chunk(), segment_->width));
  segment_->whole = layout.divided() && segments_ == 1;
  const size_t whole = buffer_bytes(call, world_);
  staging_trials_.begin(whole, plan_->staging_buffers > 0 && hands_over_ && whole >= tuning_.timed_copy_bytes);
  health_.calls().chosen(algorithm, plan_->in_place, segments_);
  if (CallLog::wants_choice(call)) [[unlikely]] {
    const Choice choice{&algorithm, plan_->in_place ? "in place" : "staged", segments_, whole, limit};
    health_.calls().tell(call, choice, selector_, situation(call.collective, whole, plan_->in_place));
  }
  take_stages();
}

/// The selector's choice. It is kept, because most calls are like the call before, and reading the rules takes time.
const Algorithm& PullExecutor::chosen_for(const Call& call, bool in_place) {
  const size_t bytes = buffer_bytes(call, world_);
  const bool same = last_chosen_ != nullptr && last_collective_ == call.collective && last_bytes_ == bytes &&
                    last_in_place_ == in_place;
  if (!same) {
    last_chosen_ = &algorithm_for(call.collective, bytes, in_place);
    last_collective_ = call.collective;
    last_bytes_ = bytes;
    last_in_place_ = in_place;
  }
  return *last_chosen_;
}

/// Whether peers can read this rank's tensors in place. A rank that has no input or no output in a rooted collective
/// does not prevent that.
bool PullExecutor::readable_in_place(const Call& call) const {
  const auto reachable = [&](const std::byte* pointer, size_t elements) {
    return elements == 0 || transport_.locate(pointer, elements * element_size(call.dtype)).has_value();
  };
  return call.blocks == nullptr && call.op != ReduceOp::premul_sum &&
         reachable(call.input, input_elements(call, rank_, world_)) &&
         reachable(call.output, output_elements(call, rank_, world_));
}

void PullExecutor::begin_epoch(Phase phase) {
  ++epoch_;
  next_ = 0;
  phase_ = phase;
}

/// Whether all peers have completed the epoch before.
bool PullExecutor::peers_completed() {
  const uint64_t target = at(epoch_ - 1, 0);
  for (; next_ < world_; ++next_) {
    if (next_ != rank_ && seen_[next_] < target && !reach(next_, target)) return false;
  }
  return true;
}

void PullExecutor::publish_signature() {
  Control& control = transport_.control();
  CallDetail& detail = control.details[epoch_ & 1];
  detail.previous = previous_;
  control.calls[epoch_ & 1] = signature_;
  detail.sequence = call_->sequence;
  if (trials_ != nullptr) {
    for (size_t kind = 0; kind < std::size(detail.costs); ++kind) detail.costs[kind] = trials_->trials[kind].costs();
  }
  if (agreed_) {
    detail.input = transport_.locate(call_->input, 0).value_or(0);
    detail.output = transport_.locate(call_->output, 0).value_or(0);
  }
}

/// Finds whether all ranks' tensors are registered. The answer is the same on every rank.
bool PullExecutor::peers_agree() {
  for (; next_ < world_; ++next_) {
    const int q = (rank_ + next_) % world_;
    if (!reach(q, at(epoch_, kSignatureReady))) return false;
    agreed_ = agreed_ && registered_in(transport_.control(q).calls[epoch_ & 1].signature);
  }
  return true;
}

const PullPlan& PullExecutor::plan_for(const Algorithm& algorithm, int root, bool in_place) {
  const size_t quick = 2 * static_cast<size_t>(index_of(algorithm)) + (in_place ? 1 : 0);
  if (root == 0 && quick < quick_.size() && quick_[quick] != nullptr) return *quick_[quick];
  std::unique_ptr<PullPlan>& plan = plans_[quick << 32 | static_cast<uint32_t>(root)];
  if (!plan) {
    const RankInfo info{rank_, world_, root};
    plan = std::make_unique<PullPlan>(in_place ? make_faster_plan(algorithm, info)
                                               : make_pull_plan(algorithm, info, false));
    pointers_.resize(std::max(pointers_.size(), static_cast<size_t>(plan->most_sources)));
  }
  if (root != 0) return *plan;
  if (quick >= quick_.size()) quick_.resize(quick + 1, nullptr);  // the algorithm was added after the table was made
  quick_[quick] = plan.get();
  return *plan;
}

void PullExecutor::bind() {
  const Call& call = *call_;
  const PullPlan& plan = *plan_;
  const CallLayout& layout = segment_->layout;
  if (is_reduction(call.collective)) {
    kernel_ = reduce_kernel(call.dtype, call.op);
    divisor_ = call.op == ReduceOp::avg ? world_ : 1;
  }
  inputs_[rank_] = layout.input_origin();
  outputs_[rank_] = layout.output_origin();
  for (int q = 0; plan.in_place && q < world_; ++q) {
    if (q == rank_) continue;
    const RankInfo info{q, world_, call.root};
    const CallDetail& detail = transport_.control(q).details[first_epoch_ & 1];
    const std::byte* const base = transport_.link(q).base;
    inputs_[q] = layout.origin(base + detail.input, input_chunks(call.collective, info, plan.parts));
    outputs_[q] = layout.origin(base + detail.output, output_chunks(call.collective, info, plan.parts));
  }
}

size_t PullExecutor::segment_limit() const {
  const PullPlan& plan = *plan_;
  if (plan.staging_buffers == 0) return tuning_.in_place_segment_bytes;
  const size_t wanted = transport_.oversubscribed() ? kStagedSegmentBytesInTurns : tuning_.staged_segment_bytes;
  return std::min(wanted, RegionLayout::kStagingBytes / (4 * static_cast<size_t>(plan.staging_buffers)));
}

/// Begins a segment and places its staging buffers.
/// Reuse is safe: what a segment overwrites is at least two epochs old. A segment takes at most a quarter of the space
/// (segment_limit), so when the places start again from 0, they do not overlap the segment before. If they
/// start again early, this function first checks that.
void PullExecutor::take_stages() {
  const PullPlan& plan = *plan_;
  Segment& segment = *segment_;
  step_ = 0;
  phase_ = Phase::steps;
  if (plan.staging_buffers == 0) return;
  const size_t bytes = segment.staging_bytes(plan.parts), all = bytes * static_cast<size_t>(plan.staging_buffers);
  // Ranks that share a processor share its cache, too: the staging buffers of a few segments should stay in that cache.
  const size_t room = transport_.oversubscribed() ? 4 * all : RegionLayout::kStagingBytes;
  const bool full = staging_cursor_ + all > RegionLayout::kStagingBytes;
  if (full || (staging_cursor_ + all > room && all <= last_staging_)) staging_cursor_ = 0;
  last_staging_ = staging_cursor_;
  segment.staging[0] = transport_.layout().staging() + staging_cursor_;
  segment.staging[1] = segment.staging[0] + bytes;
  staging_cursor_ += all;
}

bool PullExecutor::run_segment() {
  const PullPlan& plan = *plan_;
  const bool last = segment_index_ + 1 == segments_;
  const size_t end = last ? plan.steps.size() : plan.body;
  for (; step_ < end; ++step_) {
    const PlanStep& step = plan.steps[step_];
    switch (step.kind) {
      case PlanStep::Kind::publish:
        if (last && plan.in_place) confirm_reads(step_);
        if (step.phase == kCompleted) comparing_ = false;  // from here on a peer may overwrite this call's signature
        publish(at(epoch_, step.phase));
        break;
      case PlanStep::Kind::wait:
        if (!reach(step.peer, at(epoch_, step.phase))) return false;
        break;
      case PlanStep::Kind::combine:
        if (plan.in_place && transport_.unmaps_tensors()) {
          while (!combine_unchanged(step)) confirm_sources(step);
        } else {
          combine(step);
        }
        break;
    }
  }
  return true;
}

/// Combines unless a peer, whose tensor the step reads in place, may have changed it.
bool PullExecutor::combine_unchanged(const PlanStep& step) {
  const Reading reading(transport_);
  for (int i = 0; i < step.sources; ++i) {
    const Source& source = plan_->sources[static_cast<size_t>(step.first_source + i)];
    if (source.rank != rank_ && !is_staging(source.home) && may_have_changed(transport_, source.rank)) return false;
  }
  combine(step);
  return true;
}

/// Called before this rank tells the peers that its reads are done, because a peer may then end the call. The last
/// segment checks for all segments.
void PullExecutor::confirm_reads(size_t end) {
  const PullPlan& plan = *plan_;
  while (end-- > 0 && plan.steps[end].kind != PlanStep::Kind::publish) confirm_sources(plan.steps[end]);
}

/// Throws if a peer, whose tensor the step reads in place, may have changed it.
void PullExecutor::confirm_sources(const PlanStep& step) {
  for (int i = 0; i < step.sources; ++i) {
    const Source& source = plan_->sources[static_cast<size_t>(step.first_source + i)];
    if (source.rank == rank_ || is_staging(source.home)) continue;
    confirm(transport_, health_, source.rank, [&] { return context(); });
  }
}

NextReader PullExecutor::next_reader(const PlanStep& step, size_t bytes) const {
  if (streaming_ && !step.read_later && !step.tee) return NextReader::nobody;
  const bool published = is_staging(step.to) || (plan_->in_place && step.read_later);
  if (!published || !hands_over_) return NextReader::self;
  const bool past = is_staging(step.to) && bytes >= tuning_.timed_copy_bytes && staging_trials_.go_past();
  return past ? NextReader::nobody : NextReader::peer;
}

void PullExecutor::combine(const PlanStep& step) {
  const StagingTrials::Timer timer(staging_trials_);
  const PullPlan& plan = *plan_;
  const Segment& segment = *segment_;
  const CallLayout& layout = segment.layout;
  const size_t size = layout.element_bytes();
  const auto address = [&](int rank, Home home, int chunk) -> const std::byte* {
    if (call_->blocks != nullptr && !is_staging(home)) {
      return home == Home::input ? layout.input(chunk, segment.begin) : layout.output(chunk, segment.begin);
    }
    if (home == Home::input) return inputs_[rank] + layout.offset(chunk, segment.begin);
    if (home == Home::output) return outputs_[rank] + layout.offset(chunk, segment.begin);
    return transport_.link(rank).region + segment.staging[home == Home::staging_a ? 0 : 1] + segment.in_staging(chunk);
  };
  const int stride = segment.stride(step.chunks);
  for (int c = 0; c < step.chunks; c += stride) {
    const size_t elements = segment.elements(step.chunk + c, stride);
    if (elements == 0) continue;
    ReduceArgs args{};
    args.dst = const_cast<std::byte*>(address(rank_, step.to, step.chunk + c));
    args.dst2 = step.tee ? const_cast<std::byte*>(address(rank_, Home::output, step.chunk + c)) : nullptr;
    args.n = step.sources;
    args.srcs = pointers_.data();
    args.count = elements;
    args.scaled_source = -1;
    args.scale = call_->scale;
    args.divisor = step.finish ? divisor_ : 1;
    size_t foreign = 0;
    for (int i = 0; i < step.sources; ++i) {
      const Source& source = plan.sources[step.first_source + i];
      const bool scaled = source.raw && source.rank == rank_ && call_->op == ReduceOp::premul_sum;
      const bool published = scaled && source.staged != Home::none;
      pointers_[i] = address(source.rank, published ? source.staged : source.home, source.chunk + c);
      if (scaled && !published) args.scaled_source = i;
      foreign += source.rank != rank_;
    }
    // This thread is the only writer, so the addition need not be atomic as a whole.
    bytes_read_.store(bytes_read_.load(std::memory_order_relaxed) + foreign * elements * size,
                      std::memory_order_relaxed);
    if (step.sources == 1 && args.scaled_source < 0 && args.divisor == 1) {
      copy(step, args, elements * size);
    } else {
      args.next = next_reader(step, elements * size);
      kernel_(args);
    }
  }
}

/// A combination of one source, as it is.
void PullExecutor::copy(const PlanStep& step, const ReduceArgs& args, size_t bytes) {
  const std::byte* const source = args.srcs[0];
  if (source != args.dst) copy_bytes(args.dst, source, bytes, next_reader(step, bytes));
  const NextReader second = streaming_ ? NextReader::nobody : NextReader::self;
  if (step.tee) copy_bytes(args.dst2, source, bytes, second);  // args.dst may have left the cache
}

void PullExecutor::publish(uint64_t value) {
  Control& control = transport_.control();
  // With more ranks than processors most waits sleep, so no wake-up may be missed: the store and the checks for
  // sleepers are then sequentially consistent with the sleeper's. Otherwise that would cost more per round than a rare
  // miss does (engine/pull/wait.cc).
  const bool strict = transport_.oversubscribed();
  if (strict) {
    control.progress.store(value, std::memory_order_seq_cst);
  } else {
    control.progress.store(value, std::memory_order_release);
  }
  for (int q = 0; q < world_; ++q) {
    // These lines change only when a rank falls asleep, so they stay in this core's cache.
    if (transport_.control(q).sleeping_on.load(std::memory_order_seq_cst) == 1 + static_cast<uint32_t>(rank_)) {
      wake_all(control.progress);
      break;
    }
  }
}

/// Returns whether the peer's counter has reached `target`; waits for that as long as patience_ allows.
bool PullExecutor::reach(int peer, uint64_t target) {
  const std::atomic<uint64_t>& progress = transport_.control(peer).progress;
  if (progress.load(std::memory_order_acquire) < target && !pause(peer, target)) return false;
  if (held_up_) [[unlikely]]
    end_hold_up();
  seen_[peer] = progress.load(std::memory_order_acquire);
  if (comparing_) compare(peer);
  return true;
}

bool PullExecutor::pause(int peer, uint64_t target) {
  const std::atomic<uint64_t>& progress = transport_.control(peer).progress;
  if (patience_ != Patience::none && waiter_.spin(progress, target, background_)) return true;
  if (patience_ == Patience::unlimited) {
    wait_slowly(peer, target);
    return true;
  }
  const auto reached = [&] { return progress.load(std::memory_order_acquire) >= target; };
  if (patience_ == Patience::none || !Waiter::yield_until(reached)) {
    note_held_up(peer, target);
    return false;
  }
  return true;
}

/// Keeps what the call waits for, and since when. Throws if the wait has passed its deadline or cannot end well.
void PullExecutor::note_held_up(int peer, uint64_t target) {
  if (!held_up_ || awaited_.peer != peer || awaited_.target != target) {
    end_hold_up();
    awaited_ = {.peer = peer, .target = target};
    held_up_ = looked_ = Deadline::Clock::now();
  } else {
    Waiting waiting = waiting_for(peer, target);
    waiting.began = *held_up_;
    waiter_.look(waiting, looked_);
  }
}

void PullExecutor::end_hold_up() {
  if (!held_up_) return;
  health_.end_call();
  health_.calls().waited(awaited_.peer, Deadline::Clock::now() - *held_up_);
  held_up_.reset();
}

void PullExecutor::compare(int peer) {
  const Control& control = transport_.control(peer);
  const CallSignature& theirs = control.calls[first_epoch_ & 1];
  if (same_call(theirs, signature_)) [[likely]]
    return;
  const CallDetail& detail = control.details[first_epoch_ & 1];
  const bool before = same_but_for_history(theirs, signature_);
  const std::string in = before ? " was in " : " is in ";
  const auto call = [&](const CallSignature& now, const CallDetail& of) {
    return before ? describe(of.previous, of.sequence - 1) : describe(now, of.sequence);
  };
  health_.fail(ErrorKind::invalid_usage, "calls do not match: rank " + std::to_string(rank_) + in +
                                             call(signature_, transport_.control().details[first_epoch_ & 1]) +
                                             ", rank " + std::to_string(peer) + in + call(theirs, detail) +
                                             "; all ranks of a group must make the same calls in the same order");
}

void PullExecutor::wait_slowly(int peer, uint64_t target) {
  const auto began = Deadline::Clock::now();
  waiter_.wait(waiting_for(peer, target), target, background_);
  health_.calls().waited(peer, Deadline::Clock::now() - began);
}

Waiting PullExecutor::waiting_for(int peer, uint64_t target) {
  const std::atomic<uint64_t>& progress = transport_.control(peer).progress;
  Waiting waiting;
  waiting.peer = peer;
  waiting.timeout = call_->timeout;
  waiting.reached = [&progress, target] { return progress.load(std::memory_order_acquire) >= target; };
  // A peer in another call may never reach the target. Its call signature shows that at once.
  waiting.check = [this, &progress, peer] {
    const uint64_t value = progress.load(std::memory_order_acquire);
    if (comparing_ && value > at(first_epoch_, 0)) compare(peer);
  };
  waiting.straggler = [this] { return furthest_behind(); };
  waiting.context = [this, target] {
    const uint32_t phase = static_cast<uint32_t>(target - at(epoch_, 0));
    const bool in_round = target >= at(epoch_, ready(0)) && phase < kCompleted;
    return context() + (in_round ? ", round " + std::to_string(phase - ready(0)) : ", at its start");
  };
  return waiting;
}

std::string PullExecutor::context() const {
  std::string text = "rank " + std::to_string(rank_) + " of " + std::to_string(world_);
  if (call_ == nullptr) return text;
  text += " in " + describe(signature_, call_->sequence);
  const size_t bytes = call_->count * element_size(call_->dtype);
  return text + ", " + std::to_string(bytes * segment_index_ / segments_) + " of " + std::to_string(bytes) +
         " bytes done";
}

/// Follows the waits to the rank that delays all: the peer that this rank waits for may itself wait for another rank.
Suspect PullExecutor::furthest_behind() const {
  int last = rank_;
  uint64_t least = ~uint64_t{0};
  for (int q = 0; q < world_; ++q) {
    const uint64_t progress = transport_.control(q).progress.load(std::memory_order_acquire);
    if (q != rank_ && progress < least) {
      last = q;
      least = progress;
    }
  }
  return {last, least > at(first_epoch_, 0)};
}

bool PullExecutor::quiesce(std::chrono::milliseconds timeout) {
  if (health_.failed()) return false;  // some peers will never be done
  const Deadline deadline = Deadline::after(timeout);
  for (int q = 0; q < world_; ++q) {
    const std::atomic<uint64_t>& progress = transport_.control(q).progress;
    for (uint64_t value; (value = progress.load(std::memory_order_acquire)) < at(epoch_ + 1, 0);) {
      check_interrupts();
      const bool gone = transport_.control(q).left.load() != 0 || !transport_.alive(q);
      if (gone || deadline.passed()) return false;
      sleep_on(progress, value, 1'000'000);
    }
  }
  return true;
}

}  // namespace ringlet
