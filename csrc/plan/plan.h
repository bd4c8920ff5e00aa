// A plan: one rank's part of what all ranks' schedules say together. Which values are combined where, in which order,
// and where each chunk lies.
//
// Values are combined in ascending order of ranks, with the own value in the place of the own rank, and those of one
// rank in the order of their messages. Copies come before all else in a round: they see the values from before it. The
// engines add what their way of moving bytes needs (engine/pull/pull_plan.h, engine/message/message_plan.h,
// gpu/gpu_plan.h). Depends on the schedules alone, not on count, dtype or addresses. Thread safety: plain data.
#pragma once

#include <span>
#include <vector>

#include "plan/placement.h"
#include "plan/schedules.h"

namespace ringlet {

/// A value that a combine reads.
struct Source {
  int rank;
  int chunk;  ///< of that rank's
  Home home;
  bool raw;                  ///< the rank's unmodified input: premul_sum scales it, if it is this rank's own ...
  Home staged = Home::none;  ///< ... or, if peers read it, takes it from here as they do: scaled and rounded
  int message = -1;          ///< which of Plan::received brings it; -1: it is this rank's own
};

/// What goes from this rank to a peer in one round, or comes from it.
struct Transfer {
  int peer;
  uint32_t index;  ///< among all messages to, or from, that peer
  int first, count;
  int peer_round, peer_first;  ///< the other end: the peer's round, and the first of its chunks
  int place;                   ///< of its first chunk among the chunks of all messages sent, or received
  bool reduces;                ///< the receiver combines it with its own chunks
  bool last = false;           ///< sent in the last round
  bool overwritten = false;    ///< sent: its own round writes its chunks
  int free_from = 0;           ///< received, not to be combined: from this round on no earlier step uses the chunks
};

/// A write to one chunk.
struct Combine {
  int chunk;
  Home to;
  bool tee = false;        ///< to the output as well
  bool later = false;      ///< to the output when the round's readers are done
  bool finish = false;     ///< holds the contributions of all ranks: divide for avg
  bool read_later = true;  ///< peers or this rank read the result from `to` again
  int first_source = 0, sources = 1;
};

struct Plan {
  struct Range {
    int first = 0, count = 0;
  };
  struct Round {
    Range published, sent, received, combines;
  };

  template <typename T>
  static std::span<const T> part(const std::vector<T>& all, Range range) {
    return {all.data() + range.first, static_cast<size_t>(range.count)};
  }
  /// Transfer::place of a chunk that a message brings.
  int place_of(const Source& source) const {
    const Transfer& from = received[source.message];
    return from.place + source.chunk - from.peer_first;
  }
  std::span<const Source> sources_of(const Combine& one) const {
    return part(sources, {one.first_source, one.sources});
  }

  int parts = 1;
  Chunks input, output;
  std::vector<Round> rounds;
  std::vector<Combine> published;  ///< copies to where peers read: before the round
  std::vector<Transfer> sent, received;
  std::vector<Home> sent_homes;  ///< by Transfer::place
  std::vector<Combine> combines;
  std::vector<Source> sources;
  std::vector<int> delivered;  ///< chunks of the input that are also the output's, and that nothing writes
  int most_sources = 1;
  int all_received = 0;  ///< chunks of all messages received
};

/// The plan of that rank; `finish` is set only for the rank that `schedules` were made for. A peer's chunk is `incoming`:
/// where peers read each other's memory, place_all() says where it lies.
Plan lower(const Schedules& schedules, int rank, Reach reach);

/// What all ranks' placements say.
struct Placements {
  int staging_buffers = 0;      ///< the most of any rank
  int64_t copy_accesses = 0;    ///< of all ranks
  std::vector<Place> received;  ///< by Transfer::place of what `rank` receives: where the peer has it
};
Placements place_all(const Schedules& schedules, int rank, Reach reach);

}  // namespace ringlet
