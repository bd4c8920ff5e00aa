// The pull engine on the host: runs any plan, segment by segment, by reading peers' memory.
//
// Contract: run() is a collective: every rank of the transport runs the same calls in the same order. It returns when
// this rank's output is complete and its tensors may be written again, or throws (wait.h). advance() is the same in
// pieces that never wait, which any thread may take, one at a time. Nothing is allocated and no lock is taken once a
// plan exists. Small messages always go through staging buffers, so that ranks need not agree first. For larger ones
// ranks first publish call signatures, and read the tensors in place if all ranks' tensors are registered.
// Ownership: transport and selector outlive the engine. Thread safety: one thread at a time.
#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

#include "base/trial.h"
#include "engine/call_layout.h"
#include "engine/engine.h"
#include "engine/pull/call_trials.h"
#include "engine/pull/pull_plan.h"
#include "engine/pull/staging_trials.h"
#include "engine/pull/wait.h"
#include "engine/selector.h"
#include "reduce/reduce.h"
#include "transport/transport.h"

namespace ringlet {

class PullExecutor {
 public:
  PullExecutor(Transport& transport, Waiter& waiter, const Selector& selector);

  /// `background`: this is a progress thread, which must not take the processor from the rank's own computation.
  void run(const Call& call, bool background);

  /// Engine::advance.
  bool advance(const Call& call, bool spin, Awaited* awaited);

  const Algorithm& algorithm_for(Collective collective, size_t bytes, bool registered) const {
    return selector_.choose(situation(collective, bytes, registered));
  }

  /// Waits until no peer needs this rank's memory any more. Returns false if that takes longer than `timeout`.
  bool quiesce(std::chrono::milliseconds timeout);

  /// Bytes that collectives have read from peers' memory since the group was made. From any thread.
  uint64_t bytes_read() const { return bytes_read_.load(std::memory_order_relaxed); }

 private:
  /// The segment in progress, and the places of its pieces of the chunks.
  struct Segment {
    // Constructed in place: a copy would read fields with loads of another width than the stores that just wrote them,
    // and a processor cannot forward such stores.
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
    size_t staging[2] = {0, 0};  // offsets of the staging buffers in the region
  };
  /// What a call does next.
  enum class Phase { first_epoch, agreement, next_epoch, steps };
  /// How long a call may wait for a peer: until the peer arrives, a short spin, or not at all.
  enum class Patience { unlimited, spin, none };

  Situation situation(Collective collective, size_t bytes, bool registered) const {
    return {collective, bytes, world_, registered && bytes > tuning_.small(world_)};
  }
  const PullPlan& plan_for(const Algorithm& algorithm, int root, bool in_place);
  const Algorithm& chosen_for(const Call& call, bool in_place);
  bool advance_all(const Call& call, bool first);
  void begin(const Call& call);
  bool proceed();
  void begin_epoch(Phase phase);
  bool peers_completed();
  bool peers_agree();
  void publish_signature();
  bool readable_in_place(const Call& call) const;
  CallTrials* trials_of(const Call& call, size_t bytes);
  CallTrials::Way take_way(CallTrials& trials, bool readable);
  void choose(bool readable);
  void bind();
  bool run_segment();
  void confirm_reads(size_t end);
  void confirm_sources(const PlanStep& step);
  bool combine_unchanged(const PlanStep& step);
  size_t segment_limit() const;
  void take_stages();
  NextReader next_reader(const PlanStep& step, size_t bytes) const;
  void combine(const PlanStep& step);
  void copy(const PlanStep& step, const ReduceArgs& args, size_t bytes);
  void publish(uint64_t value);
  bool reach(int peer, uint64_t target);
  bool pause(int peer, uint64_t target);
  void wait_slowly(int peer, uint64_t target);
  Waiting waiting_for(int peer, uint64_t target);
  void note_held_up(int peer, uint64_t target);
  void end_hold_up();
  void compare(int peer);
  std::string context() const;
  Suspect furthest_behind() const;

  Transport& transport_;
  Waiter& waiter_;
  Health& health_;
  const Selector& selector_;
  const Tuning& tuning_;  // the selector's
  const int rank_;
  const int world_;
  int looked_at_ = 0;   // the rank whose error the next call looks for
  uint64_t epoch_ = 1;  // of the segment in progress
  Patience patience_ = Patience::unlimited;
  bool background_ = false;
  Awaited awaited_;                                     // valid while advance() waits for a peer
  std::optional<Deadline::Clock::time_point> held_up_;  // when the wait for it began
  Deadline::Clock::time_point looked_{};                // when it last looked for ended processes
  std::vector<uint64_t> seen_;                          // by peer: progress last read
  std::atomic<uint64_t> bytes_read_{0};
  std::unordered_map<uint64_t, std::unique_ptr<PullPlan>> plans_;
  std::vector<const PullPlan*> quick_;      // by algorithm and place, for root 0
  const Algorithm* last_chosen_ = nullptr;  // by the selector, for the three below; null: nothing yet
  Collective last_collective_{};
  size_t last_bytes_ = 0;
  bool last_in_place_ = false;

  // Of the call in progress.
  const Call* call_ = nullptr;
  Phase phase_ = Phase::first_epoch;
  int next_ = 0;                    // the next rank to check, which is also the number of ranks checked
  const PullPlan* plan_ = nullptr;  // null until it is chosen
  size_t step_ = 0;                 // of the plan
  std::optional<Segment> segment_;
  bool small_ = false, meets_ = false, agreed_ = false;
  CallSignature signature_, previous_;
  uint64_t history_ = 0;  // digest of all calls whose signatures were published
  uint64_t first_epoch_ = 0;
  bool comparing_ = false;  // peers' call signatures of this call can be read
  size_t segment_index_ = 0, segments_ = 1;
  size_t staging_cursor_ = 0,
         last_staging_ = 0;  // where the next segment's staging buffers start, and the last's; the same on all ranks
  ReduceKernel kernel_ = nullptr;
  int divisor_ = 1;
  CallTrials* trials_ = nullptr;  // null: nothing is tried
  Trial* timed_ = nullptr;        // the call is timed for this trial
  Deadline::Clock::time_point began_{};
  bool streaming_ = false, hands_over_ = false;
  std::vector<const std::byte*> inputs_, outputs_;  // by rank: CallLayout::origin
  std::vector<const std::byte*> pointers_;          // of one combine's sources

  AllCallTrials call_trials_;
  StagingTrials staging_trials_;
};

}  // namespace ringlet
