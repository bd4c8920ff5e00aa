// All ranks' schedules of one collective, and which sends match which receives.
//
// Contract: what a plan needs of the peers is found here in time and memory that grow as all schedules together do: one
// array of steps a rank. Thread safety: immutable once made.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "schedule/registry.h"

namespace ringlet {

struct RankSchedule {
  int parts;
  Chunks input, output;
  std::vector<Step> steps;      ///< round after round
  std::vector<uint32_t> begin;  ///< by round: its first step; one entry more for the end
  std::vector<uint32_t> match;  ///< by step: the other end of a send or a receive, among the peer's steps
  std::vector<uint32_t> place;  ///< by step: of its first chunk among those of all receives, or of all other steps

  int rounds() const { return static_cast<int>(begin.size()) - 1; }
  std::span<const Step> round(int r) const { return {steps.data() + begin[r], begin[r + 1] - begin[r]}; }
  int round_of(uint32_t step) const;
};

inline bool receives(const Step& step) { return step.verb == Verb::recv || step.verb == Verb::reduce; }
/// The first chunk that a step other than a send writes.
inline int target(const Step& step) { return step.verb == Verb::copy ? step.peer : step.first; }

class Schedules {
 public:
  /// Throws InvalidUsage if a send has no receive, a receive has no send, or a reduction's ranks wait for each other in
  /// a circle.
  Schedules(const Algorithm& algorithm, const RankInfo& info);
  /// Of any schedules; only with what matches.
  explicit Schedules(const std::vector<Schedule>& ranks);

  int world() const { return static_cast<int>(ranks_.size()); }
  const RankSchedule& operator[](int rank) const { return ranks_[rank]; }
  /// Of the k-th chunk that info.rank reduces, step after step: whether it holds the inputs of all ranks after the round.
  /// Of no other rank.
  bool complete(int rank, size_t k) const { return rank == rank_ && k < complete_.size() && complete_[k]; }

 private:
  void add(const Schedule& schedule, Chunks input, Chunks output);
  void match();

  std::vector<RankSchedule> ranks_;
  const int rank_;
  std::vector<bool> complete_;
};

/// Authored::keeps_lengths() of all ranks' schedules.
bool keeps_lengths(Collective collective, const std::vector<Schedule>& ranks);

}  // namespace ringlet
