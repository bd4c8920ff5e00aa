// The pull engine on the host: runs any plan, segment by segment, by reading peers' memory.
//
// Contract: run() is a collective: every rank of the transport runs the same calls in the same order. It returns when
// this rank's output is complete and its tensors may be written again, or throws (wait.h). Nothing is allocated and no
// lock is taken once a plan exists. Small messages always go through staging buffers, so that ranks need not agree
// first; larger ones are announced, and read in place where all ranks' tensors are registered.
// Ownership: transport and selector outlive the engine. Thread safety: one thread at a time.
#pragma once

#include <atomic>
#include <memory>
#include <unordered_map>
#include <vector>

#include "engine/call_layout.h"
#include "engine/pull/plan.h"
#include "engine/pull/wait.h"
#include "engine/selector.h"
#include "reduce/reduce.h"
#include "transport/transport.h"

namespace ringlet {

class PullExecutor {
 public:
  /// Up to this many bytes (of the schedule's whole buffer) a message is staged even if registered: no agreement and no
  /// wait for readers at the end. Two ranks gain longer by it: staged, a line is written by one of them only, while in
  /// place every line of both tensors goes back and forth between their caches.
  static constexpr size_t kSmallBytes = size_t{32} << 10;
  static constexpr size_t kSmallBytesOfTwo = size_t{1} << 20;

  static constexpr size_t small_bytes(int world) { return world == 2 ? kSmallBytesOfTwo : kSmallBytes; }

  PullExecutor(Transport& transport, Waiter& waiter, const Selector& selector);

  /// `background`: called from a progress thread, which must not take the processor from the rank's own computation.
  void run(const Call& call, bool background);

  const Algorithm& algorithm_for(Collective collective, size_t bytes, bool registered) const {
    return selector_.choose(situation(collective, bytes, registered));
  }

  /// Waits until all peers are done with everything this rank took part in; false if that takes longer than `timeout`.
  bool quiesce(std::chrono::milliseconds timeout);

  /// Read out of peers' memory by collectives, ever. From any thread.
  uint64_t bytes_read() const { return bytes_read_.load(std::memory_order_relaxed); }

 private:
  struct Segment;

  Situation situation(Collective collective, size_t bytes, bool registered) const {
    return {collective, bytes, world_, registered && bytes > small_bytes(world_)};
  }
  const Plan& plan_for(const Algorithm& algorithm, int root, bool in_place);
  void tell(const Call& call, const Algorithm& algorithm, bool in_place, size_t limit);
  void begin_epoch();
  void publish_signature(const Call& call, bool registered, const CallSignature& previous);
  bool readable_in_place(const Call& call) const;
  bool agree_on_place();
  void bind(const Plan& plan, const CallLayout& layout);
  void run_segment(const Plan& plan, const Segment& segment, bool last);
  void confirm_reads(const Plan& plan, size_t end);
  size_t segment_limit(const Plan& plan) const;
  void take_stages(const Plan& plan, Segment& segment);
  NextReader next_reader(const Plan& plan, const PlanStep& step) const;
  void combine(const Plan& plan, const PlanStep& step, const Segment& segment);
  void publish(uint64_t value);
  void wait_for(int peer, uint64_t target);
  void wait_slowly(int peer, uint64_t target);
  void compare(int peer);
  std::string context() const;
  std::string furthest_behind() const;

  Transport& transport_;
  Waiter& waiter_;
  const Selector& selector_;
  const int rank_;
  const int world_;
  uint64_t epoch_ = 1;  // of the segment in progress
  bool background_ = false;
  std::vector<uint64_t> seen_;  // by peer: progress last read
  std::atomic<uint64_t> bytes_read_{0};
  std::unordered_map<uint64_t, std::unique_ptr<Plan>> plans_;
  std::vector<const Plan*> quick_;  // by algorithm and place, for root 0

  // Of the call in progress.
  const Call* call_ = nullptr;
  CallSignature signature_;
  uint64_t history_ = 0;  // of all calls announced
  uint64_t first_epoch_ = 0;
  bool comparing_ = false;  // peers' call signatures of this call can be read
  size_t segment_index_ = 0, segments_ = 1;
  size_t staging_cursor_ = 0,
         last_staging_ = 0;  // where the next segment's staging buffers start, and the last's; the same on all ranks
  ReduceKernel kernel_ = nullptr;
  int divisor_ = 1;
  bool streaming_ = false;
  std::vector<const std::byte*> inputs_, outputs_;  // by rank: CallLayout::origin
  std::vector<const std::byte*> pointers_;          // of one combine's sources
};

}  // namespace ringlet
