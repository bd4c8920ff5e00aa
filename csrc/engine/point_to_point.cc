#include "engine/point_to_point.h"

#include <algorithm>

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

void Outgoing::put(bool in_place, uint64_t address, size_t piece) {
  Channel& mine = transport_.channel(message_.peer);
  const uint32_t sent = mine.sent.load(std::memory_order_relaxed);
  std::byte* slot = transport_.region() + transport_.layout().message(message_.peer, static_cast<int>(sent % kSlots));
  auto& header = *reinterpret_cast<SlabHeader*>(slot);
  header = {static_cast<uint64_t>(message_.dtype), message_.count, in_place ? 1u : 0u, address, message_.tag};
  if (piece > 0) copy_bytes(slot + sizeof(SlabHeader), message_.data + moved_, piece, false);
  started_ = true;
  moved_ += piece;
  announce(transport_, message_.peer, mine.sent, sent + 1);
}

bool Outgoing::advance() {
  const std::atomic<uint32_t>& sent = transport_.channel(message_.peer).sent;
  const std::atomic<uint32_t>& taken = watched();
  const size_t bytes = message_.bytes(), enough = moved_ + kAtOnce;
  while (!in_place_ && (!started_ || moved_ < bytes)) {
    if (moved_ >= enough) return false;
    if (sent.load(std::memory_order_relaxed) - taken.load(std::memory_order_acquire) >= kSlots) return false;
    const auto address = bytes >= kInPlaceBytes ? transport_.locate(message_.data, bytes) : std::nullopt;
    in_place_ = address.has_value();
    put(in_place_, address.value_or(0), in_place_ ? 0 : std::min(kPayload, bytes - moved_));
  }
  if (!in_place_) return true;
  if (taken.load(std::memory_order_acquire) != sent.load(std::memory_order_relaxed)) return false;
  moved_ = bytes;
  return true;
}

const std::atomic<uint32_t>& Outgoing::watched() const {
  return transport_.channel_of(message_.peer, transport_.rank()).received;
}

const std::atomic<uint32_t>& Incoming::watched(const Transport& transport, int peer) {
  return transport.channel_of(peer, transport.rank()).sent;
}

const SlabHeader* Incoming::next(const Transport& transport, int peer) {
  const uint32_t received = transport.channel(peer).received.load(std::memory_order_relaxed);
  if (watched(transport, peer).load(std::memory_order_acquire) == received) return nullptr;
  return reinterpret_cast<const SlabHeader*>(slot_of(transport, peer, received));
}

bool Incoming::advance() {
  std::atomic<uint32_t>& received = transport_.channel(peer_).received;
  const size_t enough = moved_ + kAtOnce;
  while (!started_ || moved_ < bytes_) {
    if (moved_ >= enough) return false;
    const SlabHeader* header = next(transport_, peer_);
    if (header == nullptr) return false;
    started_ = true;
    const bool in_place = header->in_place != 0;
    const size_t piece = std::min(in_place ? kAtOnce : kPayload, bytes_ - moved_);
    const auto* from = in_place ? transport_.link(peer_).base + header->address + moved_
                                : reinterpret_cast<const std::byte*>(header) + sizeof(SlabHeader);
    if (piece > 0) copy_bytes(to_ + moved_, from, piece, false);
    moved_ += piece;
    if (in_place && moved_ < bytes_) continue;  // the slab is the whole message: the sender keeps it until all is read
    announce(transport_, peer_, received, received.load(std::memory_order_relaxed) + 1);
  }
  return true;
}

}  // namespace ringlet
