// One rank's part of a schedule as messages: round by round what it sends, receives and combines.
//
// The messages between two ranks are numbered in each direction, so they may overtake messages of other segments. A
// plan depends on the schedule only, not on count, dtype or addresses. Thread safety: immutable once made.
#pragma once

#include <cstdint>
#include <unordered_map>
#include <vector>

#include "schedule/registry.h"

namespace ringlet {

struct SentMessage {
  int peer;
  uint32_t index;  // among all messages to that peer
  int first, count;
  bool reduced;              // by the peer, with other messages or its own chunks
  bool last;                 // sent in the last round
  bool overwritten = false;  // by its own round, so that a peer cannot read the chunks in their places
};

struct ReceivedMessage {
  int peer;
  uint32_t index;  // among all messages from that peer
  int first, count;
  int round;
  bool reduces;
  int place;        // of its first chunk among the chunks of all received messages
  int direct_from;  // from this round on no earlier step uses the chunks, so the payload may be read directly into them
};

/// What a round does with one chunk: a received or copied chunk overwrites it, or received chunks are combined with it.
struct ChunkUpdate {
  static constexpr int kOwn = -1;

  /// A chunk of a message, counted from the message's first; if `message` is kOwn, this rank's chunk of that number.
  struct Part {
    int message;
    int chunk;
  };
  int chunk;
  bool finish;              // holds the contributions of all ranks: divide for avg
  std::vector<Part> parts;  // in ascending order of rank
};

struct MessageRound {
  int first_sent = 0, sent = 0;
  int first_received = 0, received = 0;
  std::vector<ChunkUpdate> updates;
};

struct MessagePlan {
  int parts = 1;
  int most_chunks = 0;   // of one message
  int most_parts = 1;    // of one update
  int all_received = 0;  // chunks of all received messages
  int most_held =
      0;  // chunks of scratch and work that a segment may take, on the rank that takes most: the same on all ranks
  bool works = false;  // some written chunks are not part of the output
  std::vector<int> peers;
  std::vector<MessageRound> rounds;
  std::vector<SentMessage> sent;
  std::vector<ReceivedMessage> received;
  std::unordered_map<int, std::vector<int>> from;  // by peer and index: which of `received`
  Chunks input, output;
};

MessagePlan make_message_plan(const Algorithm& algorithm, const RankInfo& info);

}  // namespace ringlet
