// The message engine's state of one peer and of the call in progress. Private to the .cc files of the engine.
#pragma once

#include <algorithm>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/interrupts.h"
#include "engine/message/message_engine.h"

namespace ringlet {

/// A report on its way to a peer.
struct MessageEngine::ReportFrame {
  explicit ReportFrame(FrameKind kind) { header.kind = kind; }
  ReportFrame(const FrameHeader& of, std::string words) { set(of, std::move(words)); }

  void set(const FrameHeader& of, std::string words) noexcept {
    header = of;
    header.bytes = words.size();
    text = std::move(words);
  }

  FrameHeader header{};
  std::string text{};
};

struct MessageEngine::Link {
  struct Queued {
    size_t segment;
    int message;                                  // of plan.sent; of plan.received, if `taken`
    std::shared_ptr<const ReportFrame> report{};  // instead
    bool taken = false;                           // tells that the message has been read in the peer's memory
  };
  /// A message that the peer reads in this rank's memory.
  struct Given {
    size_t segment;
    int message;       // of plan.sent
    std::byte* block;  // that holds it; null: it lies in its place
  };

  explicit Link(int peer) : peer(peer) { sending.reserve(1); }  // a report needs no memory

  /// Returns whether there is a pipe. open() starts to connect if there is none.
  bool open(Mesh& mesh) { return attach(pipe != nullptr ? pipe : mesh.open(peer, ConnectionKind::collectives)); }
  bool find(const Mesh& mesh) { return attach(pipe != nullptr ? pipe : mesh.find(peer, ConnectionKind::collectives)); }

  const FrameHeader* next_header() {
    try {
      return reader->header();
    } catch (const Error& error) {
      throw PeerLost("rank " + std::to_string(peer) + " " + error.what());
    }
  }

  /// Whether a message of the call is still to be sent, or to be read by the peer.
  bool owes() const {
    return !given.empty() || std::any_of(queue.begin(), queue.end(), [](const Queued& each) { return !each.report; });
  }

  /// Puts a report before all frames that are not partly written.
  void queue_report(const std::shared_ptr<const ReportFrame>& report) { put_first({0, -1, report}); }
  void put_first(Queued next) { queue.insert(queue.begin() + (writer->midway() ? 1 : 0), std::move(next)); }

  /// Writes the first frame of the queue, whose header and payload are set. Returns whether it is complete.
  bool send() {
    const Queued& next = queue.front();
    if (next.report && !writer->midway()) {
      header = next.report->header;
      sending.assign(1, {const_cast<char*>(next.report->text.data()), next.report->text.size()});
    }
    return writer->write(header, sending);
  }

  /// Drops the frames of the call in progress. A partly written frame stays so, because its tensor belongs to the
  /// caller again.
  void drop() {
    mute = mute || (writer && writer->midway());
    queue.clear();
    given.clear();
    block = nullptr;
    receiving = -1;
  }

  const int peer;
  Pipe* pipe = nullptr;
  std::optional<FrameWriter> writer{};
  std::optional<FrameReader> reader{};
  std::deque<Queued> queue{};
  std::shared_ptr<const ReportFrame> said{};  // the last report of a wait
  FrameHeader header{};                       // of the message being sent
  std::vector<iovec> sending{};               // its payload
  std::vector<uint64_t> sent_places{};        // the payload, if the peer is to read its chunks here
  std::byte* block = nullptr;                 // of registered memory, that holds it
  std::vector<Given> given{};                 // and is not read yet, in the order of sending
  int receiving = -1;                         // which of plan.received is being taken
  std::vector<iovec> pieces{};                // the memory that it is read into
  std::vector<uint64_t> places{};             // or the addresses of its chunks
  std::vector<const std::byte*> chunks{};     // and where these lie here
  std::string text{};                         // of an error being taken
  bool mute = false;                          // a frame was written in part and then dropped: no frame can follow it

 private:
  bool attach(Pipe* found) {
    if (pipe == nullptr && found != nullptr) {
      pipe = found;
      writer.emplace(*pipe);
      reader.emplace(*pipe);
    }
    return pipe != nullptr;
  }
};

struct MessageEngine::Run {
  Run(const Call& call, const MessagePlan& plan, Scratch& scratch, const RankInfo& info, const CallSignature& signature)
      : call(call),
        signature(signature),
        shared{call, plan, CallLayout(call, info, plan.parts), scratch, nullptr, info.world, 0} {}

  const Call& call;
  const CallSignature signature;
  MessageCall shared;
  size_t segments = 1, window = 1;
  FrameHeader header{};  // of all its messages
  Deadline::Clock::duration slept{};
  std::optional<Deadline::Clock::time_point> asleep_since{};  // while nothing has moved
  Deadline::Clock::time_point examined{};
  size_t first = 0, next = 0;  // segments [first, next) are under way
  size_t done = 0;
  std::vector<uint8_t> finished;  // by segment modulo window
  Waiting waiting{};
  std::shared_ptr<const ReportFrame> said{};  // for whom this rank waits
};

/// Does something that may complete a segment.
template <typename Act>
void MessageEngine::in_segment(size_t index, Act act) {
  MessageSegment& segment = segments_[index % run_->window];
  const bool was_complete = segment.complete();
  act(segment);
  if (!was_complete && segment.complete()) finish_segment(index);
}

}  // namespace ringlet
