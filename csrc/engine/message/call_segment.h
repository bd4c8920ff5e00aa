// One segment of a call: the places of its chunks, and the messages that are under way, while it passes through the
// rounds of a plan.
//
// Contract: begin(), sent() and arrived() may complete rounds; the messages of the next round then go to `outbox`. A
// chunk is written only when no message still sends it. Messages may arrive before their round.
// Ownership: borrows the call's memory and a scratch pool. Thread safety: one thread at a time.
#pragma once

#include <sys/uio.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "engine/call_layout.h"
#include "engine/message/message_plan.h"
#include "engine/message/scratch.h"
#include "reduce/reduce.h"

namespace ringlet {

/// What the segments of one call share.
struct MessageCall {
  const Call& call;
  const MessagePlan& plan;
  CallLayout layout;
  Scratch& scratch;
  ReduceKernel kernel;  ///< null if nothing is combined
  int world;
  size_t width;                               ///< elements of every chunk in a segment
  std::function<void(size_t, int)> outbox{};  ///< takes (segment, which of plan.sent)
  /// Tells the sender of (segment, which of plan.received) that its memory has been read. Returns false if that memory
  /// may have changed meanwhile: then that message will never come.
  std::function<bool(size_t, int)> read_in_place{};
};

class MessageSegment {
 public:
  void begin(const MessageCall& call, size_t index);

  bool complete() const { return round_ == rounds_ && sending_ == 0; }
  int round() const { return round_; }

  /// Where the i-th chunk of a message lies.
  const std::byte* sent_chunk(const Transfer& sent, int i) const {
    return at(sent.first + i, found(call_->plan.sent_homes[sent.place + i], sent.first + i));
  }
  /// The pieces of a message; neighbours in memory are joined.
  void pieces_of_sent(int message, std::vector<iovec>& pieces) const;
  void pieces_of_received(int message, std::vector<iovec>& pieces);
  size_t bytes(int first, int count) const;

  bool expects(int message) const { return !arrived_[message]; }
  void sent(int message);
  void arrived(int message);
  /// A message arrived whose chunks lie at `places`, in the sender's memory. They are read when they are combined.
  void arrived_in_place(int message, const std::byte* const* places);
  /// Reads all that is still in senders' memory: so a sender waits for no round of this rank.
  void fetch();
  /// The chunks of a message are copied, and it is still to be sent.
  void copied(int message);
  /// The confirmation of read_in_place is on its way.
  void told();

  /// A peer that this segment waits for; negative: none.
  int awaited() const {
    const int message = missing(due());
    return message < 0 ? -1 : call_->plan.received[message].peer;
  }
  /// Whether a message of that peer is still to come: needs() in this round, awaits() in this or a later round.
  bool needs(int peer) const { return missing(due(), peer) >= 0; }
  bool awaits(int peer) const { return missing({0, static_cast<int>(arrived_.size())}, peer) >= 0; }
  /// Returns its blocks to the scratch pool.
  void forget() noexcept;

 private:
  std::byte* at(int chunk, Home home) const;
  Home target(int chunk) const { return call_->plan.output.contains(chunk) ? Home::output : Home::work; }
  /// Input that is scaled lies where its results go.
  Home found(Home home, int chunk) const { return scaled_ && home == Home::input ? target(chunk) : home; }
  size_t elements(int chunk) const { return call_->layout.elements(chunk, begin_, call_->width); }
  bool may_go_direct(const Transfer& received) const;
  void settle(int message);
  void add(std::vector<iovec>& pieces, std::byte* data, size_t bytes) const;
  void advance();
  /// The messages that this round receives.
  Plan::Range due() const { return round_ < rounds_ ? call_->plan.rounds[round_].received : Plan::Range{}; }
  /// The first of these messages that has not arrived, from that peer or, if negative, any; -1: all have.
  int missing(Plan::Range messages, int peer = -1) const;
  bool ready(const Plan::Round& round) const;
  void start_round();
  void combine(const Combine& one);
  void scale_input();
  void deliver_input();

  const MessageCall* call_ = nullptr;
  size_t index_ = 0, begin_ = 0;
  int round_ = 0, rounds_ = 0;
  bool scaled_ = false;                   // premul_sum
  int sending_ = 0;                       // messages that are not sent yet
  std::vector<int> readers_;              // by chunk: messages not sent yet that read it
  std::vector<std::byte*> scratch_;       // by received message: its block, if it did not go directly to its place
  std::vector<const std::byte*> places_;  // by received chunk: where it waits to be combined
  std::vector<uint8_t> arrived_;          // by received message
  std::vector<uint8_t> in_place_;         // by received message: it lies in its sender's memory
  std::vector<uint8_t> copied_;           // by sent message
  std::vector<std::byte> work_;           // of chunks that have no place in the output
  std::vector<const std::byte*> sources_;
};

}  // namespace ringlet
