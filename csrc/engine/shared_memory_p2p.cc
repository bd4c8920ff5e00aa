#include "engine/shared_memory_p2p.h"

#include <algorithm>

#include "engine/pull/in_place.h"
#include "reduce/reduce.h"

namespace ringlet {
namespace {

constexpr size_t kPayload = RegionLayout::kMessageBytes - sizeof(StagingHeader);
constexpr size_t kInPlaceBytes = size_t{64} << 10;  // from this size on a registered tensor is read in place
constexpr uint32_t kSlots = 2;

/// Publishes a counter, and wakes the peer if it sleeps. Sender and sleeper each write their own word, then read the
/// other's, so no wake-up is missed.
void publish(const Transport& transport, int peer, std::atomic<uint32_t>& counter, uint32_t value) {
  counter.store(value, std::memory_order_seq_cst);
  if (transport.control(peer).awaiting_messages.load(std::memory_order_seq_cst) != 0) wake_all(counter);
}

const std::byte* slot_of(const Transport& transport, int peer, uint32_t index) {
  return transport.link(peer).region + transport.layout().message(transport.rank(), static_cast<int>(index % kSlots));
}

}  // namespace

void SharedMemoryP2p::put(const Message& message, MessageProgress& progress, uint64_t address, size_t piece) {
  Channel& mine = transport_.channel(message.peer);
  const uint32_t sent = mine.sent.load(std::memory_order_relaxed);
  std::byte* slot = transport_.region() + transport_.layout().message(message.peer, static_cast<int>(sent % kSlots));
  auto& header = *reinterpret_cast<StagingHeader*>(slot);
  header = {static_cast<uint64_t>(message.dtype), message.count, progress.in_place ? 1u : 0u, address, message.tag};
  std::byte* const to = slot + sizeof(StagingHeader);
  const std::byte* const from = message.data + progress.bytes;
  if (transport_.oversubscribed()) {
    copy_bytes(to, from, piece);
  } else if (piece > 0) {
    hand_over_.copy(to, from, piece);
  }
  progress.started = true;
  progress.bytes += piece;
  publish(transport_, message.peer, mine.sent, sent + 1);
}

bool SharedMemoryP2p::send(const Message& message, MessageProgress& progress) {
  const std::atomic<uint32_t>& sent = transport_.channel(message.peer).sent;
  const std::atomic<uint32_t>& taken = transport_.channel_of(message.peer, transport_.rank()).received;
  const size_t bytes = message.bytes(), enough = progress.bytes + kAtOnce;
  while (!progress.in_place && (!progress.started || progress.bytes < bytes)) {
    if (progress.bytes >= enough) return false;
    if (sent.load(std::memory_order_relaxed) - taken.load(std::memory_order_acquire) >= kSlots) return false;
    const auto address = bytes >= kInPlaceBytes ? transport_.locate(message.data, bytes) : std::nullopt;
    progress.in_place = address.has_value();
    put(message, progress, address.value_or(0), progress.in_place ? 0 : std::min(kPayload, bytes - progress.bytes));
  }
  if (!progress.in_place) return true;
  if (taken.load(std::memory_order_acquire) != sent.load(std::memory_order_relaxed)) return false;
  progress.bytes = bytes;
  return true;
}

const StagingHeader* SharedMemoryP2p::header(int peer) const {
  const uint32_t received = transport_.channel(peer).received.load(std::memory_order_relaxed);
  if (transport_.channel_of(peer, rank()).sent.load(std::memory_order_acquire) == received) return nullptr;
  return reinterpret_cast<const StagingHeader*>(slot_of(transport_, peer, received));
}

std::optional<Envelope> SharedMemoryP2p::next(int peer) {
  const StagingHeader* first = header(peer);
  if (first == nullptr) return std::nullopt;
  return Envelope{static_cast<DType>(first->dtype), first->count, first->tag};
}

bool SharedMemoryP2p::receive(int peer, std::byte* to, size_t bytes, MessageProgress& progress) {
  std::atomic<uint32_t>& received = transport_.channel(peer).received;
  const size_t enough = progress.bytes + kAtOnce;
  while (!progress.started || progress.bytes < bytes) {
    if (progress.bytes >= enough) return false;
    const StagingHeader* segment = header(peer);
    if (segment == nullptr) return false;
    progress.started = true;
    const bool in_place = segment->in_place != 0;
    const size_t piece = std::min(in_place ? kAtOnce : kPayload, bytes - progress.bytes);
    const auto* from = in_place ? transport_.link(peer).base + segment->address + progress.bytes
                                : reinterpret_cast<const std::byte*>(segment) + sizeof(StagingHeader);
    if (piece > 0) copy_bytes(to + progress.bytes, from, piece);
    progress.bytes += piece;
    if (in_place) confirm(transport_, waiter_, peer, [&] { return context(peer, *segment, progress.bytes); });
    if (in_place && progress.bytes < bytes)
      continue;  // the segment is the whole message: the sender keeps it until all is read
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

void SharedMemoryP2p::examine(const Waiting& waiting, const Deadline& deadline, bool closely) {
  const FailureFence told;
  waiter_.examine(waiting, deadline, closely);
}

void SharedMemoryP2p::raise_if_failed() {
  const FailureFence told;
  waiter_.raise_if_failed();
}

void SharedMemoryP2p::fail(ErrorKind kind, const std::string& message) {
  const FailureFence told;
  waiter_.fail(kind, message);
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
