// The place of each chunk of one rank at each round of a schedule, in the pull engine.
//
// A *send* only publishes: the receiver reads the sender's memory. So a rank must not overwrite a chunk while a peer
// may read it. Peers read registered (`in_place`) tensors in place, and ordinary tensors through a staging buffer. The
// rules depend on one rank's schedule only:
//   in place      A result goes to the output. If the same round sends that chunk, the result goes to a staging buffer.
//                 If it is final, it goes from there to the output when the readers are done.
//   not in place  A chunk is copied to a staging buffer before it is sent. A result that is sent later goes to a
//                 staging buffer, and to the output as well if it is final.
// Input and output may share memory, chunk by chunk. Thread safety: plain data.
#pragma once

#include <cstdint>
#include <vector>

#include "schedule/step.h"

namespace ringlet {

enum class Space : uint8_t { none, input, output, staging_a, staging_b };

inline bool is_staging(Space space) { return space >= Space::staging_a; }

/// The buffers that hold the value of a chunk after the round that wrote it.
struct ChunkState {
  Space own = Space::none;     // the buffer from which this rank reads it
  Space shared = Space::none;  // the buffer from which peers read it; none if it is not published
  bool raw = false;            // still this rank's unmodified input
};

struct PlacedWrite {
  Space to = Space::none;
  bool tee = false;    // to the output as well
  bool later = false;  // to the output when the round's readers are done
};

struct PlacedRound {
  std::vector<ChunkState> before;   // by chunk, after this round's publishing copies
  std::vector<int> published;       // chunks to copy from `own` to `shared` before the round is published
  std::vector<PlacedWrite> writes;  // by chunk; to == none: not written in this round
};

struct Placement {
  std::vector<PlacedRound> rounds;
  std::vector<ChunkState> after;
};

/// How often the rank reads or writes a chunk only to copy it to or from a staging buffer.
int copy_accesses(const Placement& placement);

/// Of the rank whose schedule, input and output these are.
Placement place_chunks(const Schedule& schedule, const Chunks& input, const Chunks& output, bool in_place);

}  // namespace ringlet
