// What the message engine knows of one peer and of the call in progress. Private to engine/message*.cc.
#pragma once

#include <algorithm>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/message/message_engine.h"
#include "engine/pull/wait.h"

namespace ringlet {

struct MessageEngine::Word {
  FrameHeader header;
  std::string text;
};

struct MessageEngine::Link {
  struct Queued {
    size_t segment;
    int message;                         // of plan.sent
    std::shared_ptr<const Word> word{};  // instead
  };

  explicit Link(int peer) : peer(peer) {}

  /// Whether there is a pipe; open() starts one.
  bool open(Mesh& mesh) { return attach(pipe != nullptr ? pipe : mesh.open(peer, ConnectionKind::collectives)); }
  bool find(const Mesh& mesh) { return attach(pipe != nullptr ? pipe : mesh.find(peer, ConnectionKind::collectives)); }

  const FrameHeader* next() {
    try {
      return reader->header();
    } catch (const Error& error) {
      throw PeerLost("rank " + std::to_string(peer) + " " + error.what());
    }
  }

  /// Whether a message of the call is still to go out; words may be lost.
  bool owes() const {
    return std::any_of(queue.begin(), queue.end(), [](const Queued& each) { return !each.word; });
  }

  /// What the peer is in.
  std::string context(const FrameHeader& of, int world) const {
    return "rank " + std::to_string(peer) + " of " + std::to_string(world) + " in " +
           describe({of.signature, of.count}, of.sequence);
  }

  /// Puts a word before all that is not on its way yet.
  void say(const std::shared_ptr<const Word>& word) {
    queue.insert(queue.begin() + (writer->midway() ? 1 : 0), {0, -1, word});
  }

  /// Writes what is queued next, once its header and payload are set; true once it is out.
  bool send() {
    const Queued& next = queue.front();
    if (next.word && !writer->midway()) {
      header = next.word->header;
      sending.assign(1, {const_cast<char*>(next.word->text.data()), next.word->text.size()});
    }
    return writer->write(header, sending);
  }

  /// Forgets the call in progress. What is out by half stays so: its tensor is the caller's again.
  void drop() {
    mute = mute || (writer && writer->midway());
    queue.clear();
    receiving = -1;
  }

  const int peer;
  Pipe* pipe = nullptr;
  std::optional<FrameWriter> writer{};
  std::optional<FrameReader> reader{};
  std::deque<Queued> queue{};
  FrameHeader header{};                       // of the message being sent
  std::vector<iovec> sending{};               // its payload
  int receiving = -1;                         // which of plan.received is being taken
  std::vector<iovec> pieces{};                // where it goes
  std::string text{};                         // of an error being taken
  bool left = false;                          // the peer said goodbye
  bool mute = false;                          // nothing can follow what is out by half
  uint64_t heard = 0;                         // the last call in which it was heard
  Suspect suspects{};                         // whom it waits for
  std::string in_collective{}, in_message{};  // what it has waited in for long

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
  Run(const Call& call, const MessageCall& shared, const CallSignature& signature, size_t segments, size_t window)
      : call(call),
        shared(shared),
        signature(signature),
        segments(segments),
        window(window),
        started(Deadline::Clock::now()),
        deadline(Deadline::after(call.timeout)),
        finished(window, 0) {}

  const Call& call;
  const MessageCall& shared;
  const CallSignature signature;
  const size_t segments, window;
  const Deadline::Clock::time_point started;
  const Deadline deadline;
  FrameHeader header{};  // what all of its messages share
  bool background = false;
  Deadline::Clock::duration slept{};
  size_t first = 0, next = 0;  // segments [first, next) are under way
  size_t done = 0;
  std::vector<uint8_t> finished;  // by segment modulo window
  std::optional<OutsideRuntime> outside{};
  std::vector<Mesh::Watch> watches{};
  bool reported = false;  // the peers were told what this rank is in
  Suspect told{};         // whom the peers were last told that this rank waits for
};

}  // namespace ringlet
