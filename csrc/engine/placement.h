// Where every rank's chunks lie at every moment of a schedule, on the pull engine.
//
// A *send* only publishes: the receiver reads the sender's memory. So a chunk must not be overwritten while a peer may
// read it, and where peers can read depends on the memory: registered (`in_place`) tensors are read where they are,
// others through a stage. This file decides, for one rank and without looking at the others, where each value goes:
//
//   in place      results go to the output, unless the same round sends that chunk: then to a stage (and, if final,
//                 from there to the output when the readers are done)
//   not in place  what is sent is put on a stage first; a result that is sent later goes to a stage, and to the output
//                 as well if it is final
//
// Input and output are taken to share memory chunk by chunk. Thread safety: plain data.
#pragma once

#include <cstdint>
#include <vector>

#include "schedule/collective.h"

namespace ringlet {

enum class Space : uint8_t { none, input, output, stage_a, stage_b };

inline bool is_stage(Space space) { return space >= Space::stage_a; }

/// One value's life at one chunk: from the round that wrote it on.
struct ChunkState {
  Space own = Space::none;     // where this rank reads it
  Space shared = Space::none;  // where peers read it; none while it is not published
  bool raw = false;            // still this rank's unmodified input
};

struct PlacedWrite {
  Space to = Space::none;
  bool tee = false;    // to the output as well
  bool later = false;  // to the output once the round's readers are done
};

struct PlacedRound {
  std::vector<ChunkState> before;   // by chunk, after this round's publishing copies
  std::vector<int> published;       // chunks to copy from `own` to `shared` before the round is announced
  std::vector<PlacedWrite> writes;  // by chunk; to == none: not written in this round
};

struct Placement {
  std::vector<PlacedRound> rounds;
  std::vector<ChunkState> after;
};

Placement place_chunks(const Schedule& schedule, Collective collective, const Place& place, bool in_place);

}  // namespace ringlet
