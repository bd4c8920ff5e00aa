// Where one rank keeps each chunk, round by round.
//
// A value lies in the input until the rank writes the chunk. Where it goes then, and where peers find what is sent,
// depends on how peers get at it, and on this rank's schedule only:
//   messages   A result goes to the output, or to `work` where the chunk is none of the output's.
//   in_place   Peers read tensors. A result goes to the output. If the same round sends that chunk, it goes to a
//              staging buffer, because a peer may read the chunk; if it is final, on to the output when they are done.
//   staged     Peers read staging buffers. A chunk is copied to one before it is sent. A result that is sent later goes
//              to a staging buffer, and to the output as well if it is final.
// Input and output may share memory, chunk by chunk. Thread safety: one thread at a time.
#pragma once

#include <vector>

#include "base/home.h"
#include "plan/schedules.h"

namespace ringlet {

enum class Reach : uint8_t { messages, staged, in_place };

/// The places of the value of a chunk.
struct Place {
  Home own = Home::none;     // from which this rank reads it
  Home shared = Home::none;  // in which peers find it; none if it is not published
  bool raw = false;          // still this rank's unmodified input
};

struct PlacedWrite {
  Home to = Home::none;
  bool tee = false;         // to the output as well
  bool later = false;       // to the output when the round's readers are done
  bool read_later = false;  // peers or this rank read the result from `to` again
};

/// Goes through the rounds of one rank: begin(), then write() for every chunk that the round writes.
class Placement {
 public:
  /// `schedule` outlives this.
  Placement(const RankSchedule& schedule, Reach reach);

  void begin(int round);
  /// Chunks to copy from `own` to `shared` before the round is published, ascending.
  const std::vector<int>& published() const { return published_; }
  const Place& of(int chunk) const { return chunks_[chunk].place; }
  PlacedWrite write(int chunk);
  /// write() for all chunks of the round.
  void write_all();

  int staging_buffers() const { return staging_buffers_; }
  /// How often the rank reads or writes a chunk only to copy it to or from a staging buffer.
  int copy_accesses() const { return copy_accesses_; }

 private:
  enum Use : uint8_t { last = 1, sent = 2, used = 4 };
  struct Chunk {
    Place place;
    Home next_staging = Home::staging_a;
    uint8_t uses = 0;     // of the value that the round writes
    int sent_in = -1;     // the round, if it is at least begun, in which the chunk was last sent
    int written_in = -1;  // or written
  };

  void look_ahead();
  Home take_staging(Chunk& chunk);

  const RankSchedule& schedule_;
  const Reach reach_;
  int round_ = -1;
  size_t next_use_ = 0;
  std::vector<uint8_t> uses_;  // by step and chunk of what is written
  std::vector<Chunk> chunks_;
  std::vector<int> published_;
  int staging_buffers_ = 0, copy_accesses_ = 0;
};

}  // namespace ringlet
