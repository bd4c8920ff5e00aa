#include "engine/slot_lanes.h"

#include <algorithm>

#include "engine/in_place.h"
#include "reduce/reduce.h"

namespace ringlet {
namespace {

constexpr size_t kPayload = RegionLayout::kMessageBytes - sizeof(SlabHeader);
constexpr size_t kInPlaceBytes = size_t{64} << 10;  // from here on a registered tensor is read where it lies
constexpr uint32_t kSlots = 2;

/// Tells the peer, and wakes it if it sleeps. Both look in the same order, so that no wake-up is missed.
void announce(const Transport& transport, int peer, std::atomic<uint32_t>& counter, uint32_t value) {
  counter.store(value, std::memory_order_seq_cst);
  if (transport.control(peer).awaiting_messages.load(std::memory_order_seq_cst) != 0) wake_all(counter);
}

const std::byte* slot_of(const Transport& transport, int peer, uint32_t index) {
  return transport.link(peer).region + transport.layout().message(transport.rank(), static_cast<int>(index % kSlots));
}

}  // namespace

void SlotLanes::put(const Message& message, Moved& moved, uint64_t address, size_t piece) {
  Channel& mine = transport_.channel(message.peer);
  const uint32_t sent = mine.sent.load(std::memory_order_relaxed);
  std::byte* slot = transport_.region() + transport_.layout().message(message.peer, static_cast<int>(sent % kSlots));
  auto& header = *reinterpret_cast<SlabHeader*>(slot);
  header = {static_cast<uint64_t>(message.dtype), message.count, moved.in_place ? 1u : 0u, address, message.tag};
  const NextReader next = transport_.oversubscribed() ? NextReader::self : NextReader::peer;
  if (piece > 0) copy_bytes(slot + sizeof(SlabHeader), message.data + moved.bytes, piece, next);
  moved.started = true;
  moved.bytes += piece;
  announce(transport_, message.peer, mine.sent, sent + 1);
}

bool SlotLanes::send(const Message& message, Moved& moved) {
  const std::atomic<uint32_t>& sent = transport_.channel(message.peer).sent;
  const std::atomic<uint32_t>& taken = transport_.channel_of(message.peer, transport_.rank()).received;
  const size_t bytes = message.bytes(), enough = moved.bytes + kAtOnce;
  while (!moved.in_place && (!moved.started || moved.bytes < bytes)) {
    if (moved.bytes >= enough) return false;
    if (sent.load(std::memory_order_relaxed) - taken.load(std::memory_order_acquire) >= kSlots) return false;
    const auto address = bytes >= kInPlaceBytes ? transport_.locate(message.data, bytes) : std::nullopt;
    moved.in_place = address.has_value();
    put(message, moved, address.value_or(0), moved.in_place ? 0 : std::min(kPayload, bytes - moved.bytes));
  }
  if (!moved.in_place) return true;
  if (taken.load(std::memory_order_acquire) != sent.load(std::memory_order_relaxed)) return false;
  moved.bytes = bytes;
  return true;
}

const SlabHeader* SlotLanes::header(int peer) const {
  const uint32_t received = transport_.channel(peer).received.load(std::memory_order_relaxed);
  if (transport_.channel_of(peer, rank()).sent.load(std::memory_order_acquire) == received) return nullptr;
  return reinterpret_cast<const SlabHeader*>(slot_of(transport_, peer, received));
}

std::optional<MessageTitle> SlotLanes::next(int peer) {
  const SlabHeader* first = header(peer);
  if (first == nullptr) return std::nullopt;
  return MessageTitle{static_cast<DType>(first->dtype), first->count, first->tag};
}

bool SlotLanes::receive(int peer, std::byte* to, size_t bytes, Moved& moved) {
  std::atomic<uint32_t>& received = transport_.channel(peer).received;
  const size_t enough = moved.bytes + kAtOnce;
  while (!moved.started || moved.bytes < bytes) {
    if (moved.bytes >= enough) return false;
    const SlabHeader* slab = header(peer);
    if (slab == nullptr) return false;
    moved.started = true;
    const bool in_place = slab->in_place != 0;
    const size_t piece = std::min(in_place ? kAtOnce : kPayload, bytes - moved.bytes);
    const auto* from = in_place ? transport_.link(peer).base + slab->address + moved.bytes
                                : reinterpret_cast<const std::byte*>(slab) + sizeof(SlabHeader);
    if (piece > 0) copy_bytes(to + moved.bytes, from, piece);
    moved.bytes += piece;
    if (in_place) confirm(transport_, waiter_, peer, [&] { return story(peer, *slab, moved.bytes); });
    if (in_place && moved.bytes < bytes)
      continue;  // the slab is the whole message: the sender keeps it until all is read
    announce(transport_, peer, received, received.load(std::memory_order_relaxed) + 1);
  }
  return true;
}

std::string SlotLanes::story(int peer, const SlabHeader& slab, size_t done) const {
  const auto dtype = static_cast<DType>(slab.dtype);
  return "rank " + std::to_string(rank()) + " of " + std::to_string(world()) + " in recv from rank " +
         std::to_string(peer) + " (" + std::to_string(slab.count) + " elements of " + name(dtype) + "), " +
         std::to_string(done) + " of " + std::to_string(slab.count * element_size(dtype)) + " bytes done";
}

void SlotLanes::examine(const Waiting& waiting, const Deadline& deadline, bool closely) {
  const ToldFirst told;
  waiter_.examine(waiting, deadline, closely);
}

void SlotLanes::raise_if_failed() {
  const ToldFirst told;
  waiter_.raise_if_failed();
}

void SlotLanes::fail(ErrorKind kind, const std::string& message) {
  const ToldFirst told;
  waiter_.fail(kind, message);
}

void SlotLanes::watch(int peer, bool sending, Watchlist& list) {
  const Channel& theirs = transport_.channel_of(peer, rank());
  const std::atomic<uint32_t>& word = sending ? theirs.received : theirs.sent;
  list.words.push_back({&word, word.load(std::memory_order_acquire)});
}

void SlotLanes::sleep(const Watchlist& list, int64_t nanoseconds) {
  transport_.control().awaiting_messages.fetch_add(1, std::memory_order_seq_cst);
  sleep_on_any(list.words, nanoseconds);
  transport_.control().awaiting_messages.fetch_sub(1, std::memory_order_relaxed);
}

bool SlotLanes::all_taken() const {
  for (int q = 0; q < world(); ++q) {
    if (transport_.channel(q).sent.load() != transport_.channel_of(q, rank()).received.load()) return false;
  }
  return true;
}

}  // namespace ringlet
