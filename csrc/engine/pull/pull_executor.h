// The pull engine on the host: runs any plan, segment by segment, by reading peers' memory.
//
// Contract: run() is a collective: every rank of the transport runs the same calls in the same order. It returns when
// this rank's output is complete and its tensors may be written again, or throws (wait.h). advance() is the same in
// pieces that never wait, which any thread may take, one at a time. Nothing is allocated and no lock is taken once a
// plan exists. Small messages always go through staging buffers, so that ranks need not agree first; larger ones are
// announced, and read in place where all ranks' tensors are registered.
// Ownership: transport and selector outlive the engine. Thread safety: one thread at a time.
#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

#include "engine/call_layout.h"
#include "engine/engine.h"
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

  /// Carries a call on as far as it goes: until it is complete (true), or this rank has to wait for a peer. `spin`: as
  /// long as run() would before it sleeps. The first time begins the call, which stays where it is until it is complete
  /// or this throws, as run() does; no other may be made meanwhile.
  bool advance(const Call& call, bool spin);
  /// The peer's counter that advance() has come to.
  Awaited held_up_at() const { return awaited_; }

  const Algorithm& algorithm_for(Collective collective, size_t bytes, bool registered) const {
    return selector_.choose(situation(collective, bytes, registered));
  }

  /// Waits until all peers are done with everything this rank took part in; false if that takes longer than `timeout`.
  bool quiesce(std::chrono::milliseconds timeout);

  /// Read out of peers' memory by collectives, ever. From any thread.
  uint64_t bytes_read() const { return bytes_read_.load(std::memory_order_relaxed); }

 private:
  /// The segment in progress: where its pieces of the chunks lie.
  struct Segment {
    // In place: a copy would read what was written a moment ago in other widths, which a processor does not forward.
    Segment(const Call& call, const RankInfo& info, int parts) : layout(call, info, parts) {}
    size_t in_staging(int chunk) const {
      return whole ? layout.offset(chunk, 0) : chunk * width * layout.element_bytes();
    }
    size_t staging_bytes(int parts) const { return round_up(in_staging(parts), 64); }
    /// Elements of this segment in chunks [chunk, chunk + chunks), which are neighbours in memory.
    size_t elements(int chunk, int chunks) const {
      return whole ? layout.start(chunk + chunks) - layout.start(chunk) : layout.elements(chunk, begin, width);
    }
    /// How many chunks one step may take at once: all of them while their pieces touch.
    int stride(int chunks) const { return whole ? chunks : 1; }

    CallLayout layout;
    size_t begin = 0;            // in every chunk
    size_t width = 0;            // of every chunk
    bool whole = false;          // a divided buffer in one segment
    size_t staging[2] = {0, 0};  // where the staging buffers start, from the region's start
  };
  /// What a call does next.
  enum class Phase { first_epoch, agreement, next_epoch, steps };
  /// How long it may be kept from that: until the peer comes, a moment, or not at all.
  enum class Patience { unlimited, spin, none };

  Situation situation(Collective collective, size_t bytes, bool registered) const {
    return {collective, bytes, world_, registered && bytes > small_bytes(world_)};
  }
  const Plan& plan_for(const Algorithm& algorithm, int root, bool in_place);
  const Algorithm& chosen_for(const Call& call, bool in_place);
  void tell(const Algorithm& algorithm, size_t limit);
  bool carry_on(const Call& call, bool first);
  void begin(const Call& call);
  bool proceed();
  void begin_epoch(Phase phase);
  bool peers_completed();
  bool peers_agree();
  void publish_signature();
  bool readable_in_place(const Call& call) const;
  void choose(bool in_place);
  void bind();
  bool run_segment();
  void confirm_reads(size_t end);
  size_t segment_limit() const;
  void take_stages();
  NextReader next_reader(const PlanStep& step) const;
  void combine(const PlanStep& step);
  void publish(uint64_t value);
  bool reach(int peer, uint64_t target);
  bool pause(int peer, uint64_t target);
  void wait_slowly(int peer, uint64_t target);
  Waiting waiting_for(int peer, uint64_t target);
  void note_held_up(int peer, uint64_t target);
  void end_hold_up();
  void compare(int peer);
  std::string context() const;
  std::string furthest_behind() const;

  Transport& transport_;
  Waiter& waiter_;
  const Selector& selector_;
  const int rank_;
  const int world_;
  uint64_t epoch_ = 1;  // of the segment in progress
  Patience patience_ = Patience::unlimited;
  bool background_ = false;
  Awaited awaited_;                         // valid while a call is held up
  std::optional<Waiter::Ongoing> held_up_;  // since when, and what was done about it
  Deadline::Clock::time_point held_since_{};
  std::vector<uint64_t> seen_;  // by peer: progress last read
  std::atomic<uint64_t> bytes_read_{0};
  std::unordered_map<uint64_t, std::unique_ptr<Plan>> plans_;
  std::vector<const Plan*> quick_;          // by algorithm and place, for root 0
  const Algorithm* last_chosen_ = nullptr;  // by the selector, for the three below; null: nothing yet
  Collective last_collective_{};
  size_t last_bytes_ = 0;
  bool last_in_place_ = false;

  // Of the call in progress.
  const Call* call_ = nullptr;
  Phase phase_ = Phase::first_epoch;
  int next_ = 0;                // the rank that is looked at next, or how many have been
  const Plan* plan_ = nullptr;  // null until it is chosen
  size_t step_ = 0;             // of the plan
  std::optional<Segment> segment_;
  bool small_ = false, agreed_ = false;
  CallSignature signature_, previous_;
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
