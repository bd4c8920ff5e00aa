#include "engine/shared_memory_p2p.h"

#include <algorithm>

#include "engine/pull/peer_reads.h"
#include "reduce/reduce.h"

namespace ringlet {
namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kPayloadBytes = size_t{64} << 10;  // of a segment, at most
constexpr size_t kInPlaceBytes = size_t{64} << 10;  // from this size on a registered tensor is read in place

bool is_short(size_t bytes) { return bytes <= RegionLayout::kShortBytes; }

/// Publishes a counter, and wakes the peer if it sleeps. Sender and sleeper each write their own word, then read the
/// other's, so no wake-up is missed.
void publish(const Transport& transport, int peer, std::atomic<uint32_t>& counter, uint32_t value) {
  counter.store(value, std::memory_order_seq_cst);
  if (transport.control(peer).awaiting_messages.load(std::memory_order_seq_cst) != 0) wake_all(counter);
}

}  // namespace

/// The place that follows a segment of so many bytes. No segment goes beyond the area's end.
uint64_t SharedMemoryP2p::after(uint64_t place, size_t bytes) const {
  const uint64_t next = place + (is_short(bytes) ? 0 : (bytes + 63) / 64 * 64), left = area_ - next % area_;
  return left < kPayloadBytes ? next + left : next;
}

/// Whether no segment that `peer` has not taken is in the way of the next.
bool SharedMemoryP2p::has_room(int peer) const {
  const uint32_t sent = transport_.channel(peer).sent.load(std::memory_order_relaxed);
  const uint32_t taken = transport_.channel_of(peer, rank()).received.load(std::memory_order_acquire);
  if (sent == taken) return true;
  const Outgoing& out = outgoing_[static_cast<size_t>(peer)];
  return sent - taken < RegionLayout::kSegments &&
         out.place + kPayloadBytes <= out.places[taken % RegionLayout::kSegments] + area_;
}

/// Copies into segment `index` for `peer`. Returns whether the peer is to time its copy.
bool SharedMemoryP2p::copy(int peer, uint32_t index, std::byte* to, const std::byte* from, size_t bytes) {
  const bool shared_cache = transport_.oversubscribed();
  if (shared_cache || bytes < timed_bytes_) {
    copy_bytes(to, from, bytes, shared_cache ? NextReader::self : NextReader::peer);
    return false;
  }
  Outgoing& out = outgoing_[static_cast<size_t>(peer)];
  const Channel& theirs = transport_.channel_of(peer, rank());
  const uint32_t not_taken = index - theirs.received.load(std::memory_order_acquire);
  if (out.timing && not_taken < index - out.segment) {
    out.timing = false;
    const auto both = out.time + std::chrono::nanoseconds(theirs.copy_time.load(std::memory_order_relaxed));
    out.trial.took(static_cast<double>(both.count()) / static_cast<double>(out.bytes));
  }
  const bool timed = !out.timing && out.trial.times();
  const auto began = timed ? Clock::now() : Clock::time_point{};
  copy_bytes(to, from, bytes, out.trial.way() != 0 ? NextReader::nobody : NextReader::peer);
  if (timed) {
    out.timing = true;
    out.segment = index;
    out.bytes = bytes;
    out.time = Clock::now() - began;
  }
  return timed;
}

void SharedMemoryP2p::put(const Message& message, MessageProgress& progress, uint64_t address, size_t piece) {
  Channel& mine = transport_.channel(message.peer);
  const uint32_t index = mine.sent.load(std::memory_order_relaxed);
  Outgoing& out = outgoing_[static_cast<size_t>(message.peer)];
  std::byte* const segment = transport_.region() + transport_.layout().segment(message.peer, index);
  std::byte* const area = transport_.region() + transport_.layout().messages(message.peer);
  std::byte* const to = is_short(piece) ? segment + sizeof(StagingHeader) : area + out.place % area_;
  const bool timed = copy(message.peer, index, to, message.data + progress.bytes, piece);
  *reinterpret_cast<StagingHeader*>(segment) = {
      static_cast<uint64_t>(message.dtype), message.count, progress.in_place, address, message.tag, timed};
  out.places[index % RegionLayout::kSegments] = out.place;
  out.place = after(out.place, piece);
  progress.started = true;
  progress.bytes += piece;
  publish(transport_, message.peer, mine.sent, index + 1);
}

bool SharedMemoryP2p::send(const Message& message, MessageProgress& progress) {
  const std::atomic<uint32_t>& sent = transport_.channel(message.peer).sent;
  const std::atomic<uint32_t>& taken = transport_.channel_of(message.peer, transport_.rank()).received;
  const size_t bytes = message.bytes(), enough = progress.bytes + kAtOnce;
  while (!progress.in_place && (!progress.started || progress.bytes < bytes)) {
    if (progress.bytes >= enough) return false;
    if (!has_room(message.peer)) return false;
    const auto address = bytes >= kInPlaceBytes ? transport_.locate(message.data, bytes) : std::nullopt;
    progress.in_place = address.has_value();
    put(message, progress, address.value_or(0),
        progress.in_place ? 0 : std::min(kPayloadBytes, bytes - progress.bytes));
  }
  if (!progress.in_place) return true;
  if (taken.load(std::memory_order_acquire) != sent.load(std::memory_order_relaxed)) return false;
  progress.bytes = bytes;
  return true;
}

const StagingHeader* SharedMemoryP2p::header(int peer) const {
  const uint32_t received = transport_.channel(peer).received.load(std::memory_order_relaxed);
  if (transport_.channel_of(peer, rank()).sent.load(std::memory_order_acquire) == received) return nullptr;
  return reinterpret_cast<const StagingHeader*>(transport_.link(peer).region +
                                                transport_.layout().segment(rank(), received));
}

std::optional<Envelope> SharedMemoryP2p::next(int peer) {
  const StagingHeader* first = header(peer);
  if (first == nullptr) return std::nullopt;
  if (!Envelope::is_possible(first->dtype, first->count)) {
    health().fail(ErrorKind::peer_lost, "rank " + std::to_string(peer) + " sent bytes that are not a message");
  }
  return Envelope{static_cast<DType>(first->dtype), first->count, first->tag};
}

bool SharedMemoryP2p::receive(int peer, std::byte* to, size_t bytes, MessageProgress& progress) {
  Channel& mine = transport_.channel(peer);
  std::atomic<uint32_t>& received = mine.received;
  const std::byte* const area = transport_.link(peer).region + transport_.layout().messages(rank());
  uint64_t& place = incoming_[static_cast<size_t>(peer)];
  const size_t enough = progress.bytes + kAtOnce;
  while (!progress.started || progress.bytes < bytes) {
    if (progress.bytes >= enough) return false;
    const StagingHeader* segment = header(peer);
    if (segment == nullptr) return false;
    progress.started = true;
    const bool in_place = segment->in_place != 0;
    const size_t piece = std::min(in_place ? kAtOnce : kPayloadBytes, bytes - progress.bytes);
    const std::byte* const from = in_place          ? transport_.link(peer).base + segment->address + progress.bytes
                                  : is_short(piece) ? reinterpret_cast<const std::byte*>(segment + 1)
                                                    : area + place % area_;
    const auto confirm_message = [&] {
      confirm(transport_, health(), peer, [&] { return context(peer, *segment, progress.bytes); });
    };
    const auto began = segment->timed != 0 ? Clock::now() : Clock::time_point{};
    if (in_place) {
      // The peer may have failed long ago, and its tensor may be no memory any more.
      while (!read_tensor(transport_, peer, [&] { copy_bytes(to + progress.bytes, from, piece); })) confirm_message();
    } else if (piece > 0) {
      copy_bytes(to + progress.bytes, from, piece);
    }
    if (segment->timed != 0) mine.copy_time.store(static_cast<uint32_t>((Clock::now() - began).count()));
    progress.bytes += piece;
    if (in_place) confirm_message();
    if (in_place && progress.bytes < bytes)
      continue;  // the segment is the whole message: the sender keeps it until all is read
    if (!in_place) place = after(place, piece);
    publish(transport_, peer, received, received.load(std::memory_order_relaxed) + 1);
  }
  return true;
}

std::string SharedMemoryP2p::context(int peer, const StagingHeader& segment, size_t done) const {
  const auto dtype = static_cast<DType>(segment.dtype);
  return "rank " + std::to_string(rank()) + " of " + std::to_string(world()) + " in recv from rank " +
         std::to_string(peer) + " (" + std::to_string(segment.count) + " elements of " + name(dtype) + "), " +
         std::to_string(done) + " of " + std::to_string(segment.count * element_size(dtype)) + " bytes done";
}

void SharedMemoryP2p::watch(int peer, bool sending, Watchlist& list) {
  const Channel& theirs = transport_.channel_of(peer, rank());
  const std::atomic<uint32_t>& word = sending ? theirs.received : theirs.sent;
  list.words.push_back({&word, word.load(std::memory_order_acquire)});
}

void SharedMemoryP2p::sleep(const Watchlist& list, int64_t nanoseconds) {
  transport_.control().awaiting_messages.fetch_add(1, std::memory_order_seq_cst);
  sleep_on_any(list.words, nanoseconds);
  transport_.control().awaiting_messages.fetch_sub(1, std::memory_order_relaxed);
}

bool SharedMemoryP2p::all_taken() const {
  for (int q = 0; q < world(); ++q) {
    if (transport_.channel(q).sent.load() != transport_.channel_of(q, rank()).received.load()) return false;
  }
  return true;
}

}  // namespace ringlet
