#include "engine/pipe_p2p.h"

#include <algorithm>

#include "base/deadline.h"
#include "engine/message/message_engine.h"

namespace ringlet {
namespace {

// Looks before a sleep. They are few: each costs a system call per pipe, and peers may need this processor.
constexpr int kLooks = 20;

}  // namespace

StreamP2p::StreamP2p(MessageEngine& engine)
    : P2pTransport(engine.health()),
      engine_(engine),
      outgoing_(static_cast<size_t>(engine.world())),
      incoming_(static_cast<size_t>(engine.world())) {}

int StreamP2p::spins(bool background) const { return background ? 1 : kLooks; }

bool StreamP2p::send(const Message& message, MessageProgress& progress) {
  std::optional<Outgoing>& out = outgoing_[message.peer];
  if (!out) {
    Pipe* const pipe = open(message.peer);
    if (pipe == nullptr) return false;
    out.emplace(Outgoing{pipe, FrameWriter(*pipe)});
  }
  FrameHeader header;
  header.kind = FrameKind::message;
  header.bytes = message.bytes();
  header.signature = static_cast<uint64_t>(message.dtype);
  header.count = message.count;
  header.detail = message.tag;
  const iovec payload{message.data, message.bytes()};
  const bool complete = out->writer.write(header, {&payload, payload.iov_len > 0 ? size_t{1} : size_t{0}});
  if (out->pipe->memory_gone()) fail_for_memory("send to", message.peer);
  progress.started = complete || out->writer.midway();
  progress.bytes = complete ? message.bytes() : out->writer.done() - std::min(out->writer.done(), sizeof header);
  return complete;
}

/// The pipe for collectives must be open, too, before a message is sent: through it each rank learns of the other's
/// errors, and of the end of the other's process.
Pipe* StreamP2p::open(int peer) {
  try {
    const bool heard = engine_.mesh().open(peer, ConnectionKind::collectives) != nullptr;
    Pipe* const pipe = engine_.mesh().open(peer, ConnectionKind::outgoing);
    return heard ? pipe : nullptr;
  } catch (const Error&) {
    health().poll_failures();  // throws what the peer reported, if it did
    throw;
  }
}

StreamP2p::Incoming* StreamP2p::incoming(int peer) {
  std::optional<Incoming>& in = incoming_[peer];
  if (!in) {
    Pipe* const pipe = engine_.mesh().find(peer, ConnectionKind::incoming);
    if (pipe == nullptr) return nullptr;
    in.emplace(Incoming{pipe, FrameReader(*pipe)});
  }
  return &*in;
}

std::optional<Envelope> StreamP2p::next(int peer) {
  Incoming* const in = incoming(peer);
  if (in == nullptr) return std::nullopt;
  const FrameHeader* header = nullptr;
  try {
    header = in->reader.header();
  } catch (const PeerLost& error) {
    health().fail(error.kind(), "rank " + std::to_string(rank()) + " of " + std::to_string(world()) +
                                    " in recv: rank " + std::to_string(peer) + " " + error.what());
  }
  if (header == nullptr) return std::nullopt;
  const auto dtype = static_cast<DType>(header->signature);
  if (header->kind != FrameKind::message || !Envelope::is_possible(header->signature, header->count) ||
      header->bytes != header->count * element_size(dtype)) {
    health().fail(ErrorKind::peer_lost, "rank " + std::to_string(peer) + " sent bytes that are not a message");
  }
  return Envelope{dtype, header->count, header->detail};
}

bool StreamP2p::receive(int peer, std::byte* to, size_t bytes, MessageProgress& progress) {
  Incoming* const in = incoming(peer);
  const iovec payload{to, bytes};
  const bool complete = in->reader.payload({&payload, bytes > 0 ? size_t{1} : size_t{0}});
  if (in->pipe->memory_gone()) fail_for_memory("recv from", peer);
  progress.started = true;
  progress.bytes = complete ? bytes : in->reader.taken();
  return complete;
}

void StreamP2p::fail_for_memory(const char* call, int peer) {
  health().fail(ErrorKind::invalid_usage, "rank " + std::to_string(rank()) + " of " + std::to_string(world()) + " in " +
                                              call + " rank " + std::to_string(peer) + ": " + kMemoryGone);
}

void StreamP2p::watch(int peer, bool sending, Watchlist& list) {
  engine_.mesh().about_to_sleep(ConnectionKind::outgoing);
  engine_.mesh().about_to_sleep(ConnectionKind::incoming);
  if (sending && outgoing_[peer]) list.pipes.push_back({outgoing_[peer]->pipe, false, true});
  if (!sending && incoming(peer) != nullptr) list.pipes.push_back({incoming_[peer]->pipe, true, false});
}

void StreamP2p::sleep(const Watchlist& list, int64_t nanoseconds) {
  engine_.mesh().sleep(ConnectionKind::incoming, list.pipes, nanoseconds);
}

/// Data of a message may be on their way when the peer's goodbye, on another connection, is here.
void StreamP2p::examine(Waiting& waiting, Health::Look look) {
  waiting.awaits = [](int) { return false; };
  if (look != Health::Look::reports) waiting.check = [&] { check_alive(waiting); };
  health().examine(waiting, look);
}

/// A rank that waits for a message connects to the sender, too: perhaps a firewall lets only this side. The connection
/// for collectives ends when the sender's process does.
bool StreamP2p::lost(int peer, const Waiting& waiting) {
  try {
    engine_.mesh().open(peer, ConnectionKind::collectives);
  } catch (const PeerLost&) {
    if (waiting.peer >= 0) throw;
    return true;  // a message may come from another rank
  }
  if (waiting.receiving) {
    try {
      engine_.mesh().open(peer, ConnectionKind::incoming);
    } catch (const PeerLost&) {  // the peer has left, which the other connection shows
    }
  }
  return engine_.mesh().gone(peer, waiting.receiving);
}

void StreamP2p::check_alive(const Waiting& waiting) {
  bool all = true;
  for (int peer = 0; peer < world(); ++peer) {
    if (peer == rank() || (waiting.peer >= 0 && peer != waiting.peer)) continue;
    all = lost(peer, waiting) && all;
  }
  if (!all || waiting.reached()) return;
  health().poll_failures();  // the peer may have sent a final error before its connection ended
  for (int peer = 0; peer < world(); ++peer) {
    if (peer != rank() && (waiting.peer < 0 || peer == waiting.peer)) engine_.read_final_error(peer);
  }
  health().raise_noted();
  const std::string peer = waiting.peer < 0 ? "every other rank" : "rank " + std::to_string(waiting.peer);
  health().fail(ErrorKind::peer_lost, waiting.context() + ": " + peer +
                                          " left the group, or its process is gone; look at that rank's own output");
}

}  // namespace ringlet
