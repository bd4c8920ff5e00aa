#include "engine/p2p.h"

#include <algorithm>

namespace ringlet {
namespace {

constexpr size_t kInPlaceBytes = size_t{64} << 10;  ///< from this size on, a registered tensor is sent without a copy
constexpr size_t kAtOnce = size_t{512} << 10;       // of that: no message delays the others

}  // namespace

/// Null until there is a pipe. Only then does this rank open it: a receiver waits for its peer to do so.
P2p::Connection* P2p::connection_to(int peer) {
  std::optional<Connection>& connection = connections_[static_cast<size_t>(peer)];
  if (connection && connection->opened) [[likely]]
    return &*connection;
  Pipe* const pipe = open(peer);
  if (pipe == nullptr) return nullptr;
  if (!connection) connection.emplace(*pipe);
  connection->opened = true;
  return &*connection;
}

P2p::Connection* P2p::connection_from(int peer) {
  std::optional<Connection>& connection = connections_[static_cast<size_t>(peer)];
  if (connection) [[likely]]
    return &*connection;
  if (Pipe* const pipe = mesh_.find(peer, ConnectionKind::messages)) connection.emplace(*pipe);
  return connection ? &*connection : nullptr;
}

bool P2p::send(const Message& message, MessageProgress& progress) {
  Connection* const out = connection_to(message.peer);
  if (out == nullptr) return false;
  const size_t bytes = message.bytes();
  if (!progress.in_place || !progress.started) {
    const auto address = bytes >= kInPlaceBytes ? locate(message.peer, message) : std::nullopt;
    progress.in_place = address.has_value();
    FrameHeader header;
    header.kind = FrameKind::message;
    header.bytes = progress.in_place ? 0 : bytes;
    header.signature = static_cast<uint64_t>(message.dtype);
    header.count = message.count;
    header.sequence = address.value_or(0);
    header.detail = message.tag;
    header.segment = progress.in_place ? 1 : 0;
    const iovec payload{message.data, header.bytes};
    const bool written = out->writer.write(header, {&payload, header.bytes > 0 ? size_t{1} : size_t{0}});
    if (out->pipe.memory_gone()) fail_for_memory("send to", message.peer);
    progress.started = written || out->writer.midway();
    if (!progress.in_place) {
      progress.bytes = written ? bytes : out->writer.done() - std::min(out->writer.done(), sizeof header);
      return written;
    }
    if (!written) return false;
  }
  if (!out->pipe.all_read()) return false;
  progress.bytes = bytes;
  return true;
}

std::optional<Envelope> P2p::next(int peer) {
  Connection* const in = connection_from(peer);
  if (in == nullptr) return std::nullopt;
  const FrameHeader* header = nullptr;
  try {
    header = in->reader.header();
  } catch (const PeerLost& error) {
    health().fail(error.kind(), health().self() + " in recv: rank " + std::to_string(peer) + " " + error.what());
  }
  if (header == nullptr) return std::nullopt;
  const auto dtype = static_cast<DType>(header->signature);
  const bool in_place = header->segment != 0;
  if (header->kind != FrameKind::message || !Envelope::is_possible(header->signature, header->count) ||
      header->bytes != (in_place ? 0 : header->count * element_size(dtype))) {
    health().fail(ErrorKind::peer_lost, "rank " + std::to_string(peer) + " sent bytes that are not a message");
  }
  return Envelope{dtype, header->count, header->detail};
}

/// The header of a message that is read in place stays in the pipe until all is read: its sender waits for that.
bool P2p::receive(int peer, std::byte* to, size_t bytes, MessageProgress& progress) {
  Connection& in = *connection_from(peer);
  const FrameHeader& header = *in.reader.header();
  progress.started = true;
  progress.in_place = header.segment != 0;
  if (progress.in_place) {
    const auto context = [&] {
      return health().self() + " in recv from rank " + std::to_string(peer) + " (" + std::to_string(header.count) +
             " elements of " + name(static_cast<DType>(header.signature)) + "), " + std::to_string(progress.bytes) +
             " of " + std::to_string(bytes) + " bytes done";
    };
    const size_t piece = std::min(kAtOnce, bytes - progress.bytes);
    read_in_place(peer, header.sequence + progress.bytes, to + progress.bytes, piece, context);
    progress.bytes += piece;
    return progress.bytes == bytes && in.reader.payload({});
  }
  const iovec payload{to, bytes};
  const bool complete = in.reader.payload({&payload, bytes > 0 ? size_t{1} : size_t{0}});
  if (in.pipe.memory_gone()) fail_for_memory("recv from", peer);
  progress.bytes = complete ? bytes : in.reader.taken();
  return complete;
}

void P2p::read_in_place(int peer, uint64_t, std::byte*, size_t, const std::function<std::string()>& context) {
  health().fail(ErrorKind::peer_lost, context() + ": rank " + std::to_string(peer) +
                                          " sent an address in place of the message, and this rank cannot read it");
}

void P2p::fail_for_memory(const char* call, int peer) {
  health().fail(ErrorKind::invalid_usage,
                health().self() + " in " + call + " rank " + std::to_string(peer) + ": " + kMemoryGone);
}

void P2p::watch(int peer, bool sending, Watchlist& list) {
  mesh_.about_to_sleep(ConnectionKind::messages);
  if (const Connection* connection = sending ? connection_to(peer) : connection_from(peer))
    list.push_back({&connection->pipe, !sending, sending});
}

}  // namespace ringlet
