// One rank's part of a schedule as messages: what goes out, what comes in, and what is combined, round by round.
//
// Messages between two ranks are numbered in each direction, so that they may overtake those of other segments. A plan
// depends on the schedule only, never on count, dtype or addresses. Thread safety: immutable once made.
#pragma once

#include <cstdint>
#include <unordered_map>
#include <vector>

#include "schedule/registry.h"

namespace ringlet {

struct SentMessage {
  int peer;
  uint32_t index;  // among all that go to that peer
  int first, count;
};

struct ReceivedMessage {
  int peer;
  uint32_t index;  // among all that come from that peer
  int first, count;
  int round;
  bool reduces;
  int direct_from;  // from this round on nothing before it touches the chunks: the payload may go straight to its place
};

/// What becomes of one chunk in one round: overwritten by a received or copied one, or combined with received ones.
struct ChunkUpdate {
  static constexpr int kOwn = -1;

  /// Of which message's chunk, counted from the message's first; kOwn: this rank's own chunk of that number.
  struct Part {
    int message;
    int chunk;
  };
  int chunk;
  bool finish;              // all contributions are in: divide for avg
  std::vector<Part> parts;  // in ascending order of rank
};

struct MessageRound {
  int first_sent = 0, sent = 0;
  int first_received = 0, received = 0;
  std::vector<ChunkUpdate> updates;
};

struct MessagePlan {
  int parts = 1;
  int most_chunks = 0;  // of one message
  int most_parts = 1;   // of one update
  int most_held = 0;    // chunks of scratch and work that a segment may take, on the rank that takes most: alike on all
  bool works = false;   // chunks outside of the output are written
  std::vector<int> peers;
  std::vector<MessageRound> rounds;
  std::vector<SentMessage> sent;
  std::vector<ReceivedMessage> received;
  std::unordered_map<int, std::vector<int>> from;  // by peer and index: which of `received`
  Chunks input, output;
};

MessagePlan make_message_plan(const Algorithm& algorithm, const RankInfo& info);

}  // namespace ringlet
