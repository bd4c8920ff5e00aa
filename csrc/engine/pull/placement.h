// Where every rank's chunks lie at every moment of a schedule, on the pull engine.
//
// A *send* only publishes: the receiver reads the sender's memory. So a chunk must not be overwritten while a peer may
// read it. Peers read registered (`in_place`) tensors where they are, others through a staging buffer. This file
// decides for one rank, without looking at the others, where each value goes:
//   in place      A result goes to the output. If the same round sends that chunk, it goes to a staging buffer and, if
//                 it is final, from there to the output when the readers are done.
//   not in place  What is sent is first put in a staging buffer. A result that is sent later goes to a staging buffer,
//                 and to the output as well if it is final.
// Input and output are taken to share memory chunk by chunk. Thread safety: plain data.
#pragma once

#include <cstdint>
#include <vector>

#include "schedule/step.h"

namespace ringlet {

enum class Space : uint8_t { none, input, output, staging_a, staging_b };

inline bool is_staging(Space space) { return space >= Space::staging_a; }

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

/// Of the rank whose schedule, input and output these are.
Placement place_chunks(const Schedule& schedule, const Chunks& input, const Chunks& output, bool in_place);

}  // namespace ringlet
