#include "transport/ring_pipe.h"

#include <algorithm>
#include <cstring>

#include "reduce/copy.h"

namespace ringlet {
namespace {

using Clock = std::chrono::steady_clock;

// Of a segment, at most: the reader copies one while the writer copies the next. A message of 64 KiB with its header is
// one segment.
constexpr size_t kPayloadBytes = size_t{64} << 10;  ///< the payload of a segment of a pipe between ranks of one host
constexpr size_t kPiece = kPayloadBytes + Pipe::kMostPeeked;
constexpr size_t kAtOnce = 8 * kPiece;  // so that no message delays the others

// Ranks that share a processor share its cache, too: the whole ring should stay in that cache.
constexpr size_t kRingInTurns = size_t{512} << 10;

bool is_short(size_t bytes) { return bytes <= RegionLayout::kSlotBytes; }

size_t length(const iovec* pieces, int n) {
  size_t bytes = 0;
  for (int i = 0; i < n; ++i) bytes += pieces[i].iov_len;
  return bytes;
}

}  // namespace

RingPipe::RingPipe(Transport& transport, int peer, ConnectionKind kind, size_t timed_bytes)
    : transport_(transport),
      peer_(peer),
      kind_(kind),
      timed_bytes_(transport.oversubscribed() ? SIZE_MAX : timed_bytes),
      slots_(RegionLayout::slots(kind)),
      size_(std::min(transport.layout().ring_bytes(kind), transport.oversubscribed() ? kRingInTurns : SIZE_MAX)),
      mine_(transport.channel(peer).rings[static_cast<size_t>(kind)]),
      theirs_(transport.channel_of(peer, transport.rank()).rings[static_cast<size_t>(kind)]),
      ring_(transport.region() + transport.layout().ring(kind, peer)),
      slots_to_peer_(transport.region() + transport.layout().slot(kind, peer, 0)),
      peers_ring_(transport.link(peer).region + transport.layout().ring(kind, transport.rank())),
      slots_from_peer_(transport.link(peer).region + transport.layout().slot(kind, transport.rank(), 0)),
      wakeup_(transport.wakeup(peer, kind)),
      asleep_(transport.control(peer).asleep[static_cast<size_t>(kind)]),
      places_(slots_) {}

/// Each side first writes its own word and then reads the other's, sequentially consistently, so no wake-up is missed.
void RingPipe::publish(std::atomic<uint32_t>& count, uint32_t value) noexcept {
  count.store(value, std::memory_order_seq_cst);
  if (asleep_.load(std::memory_order_seq_cst) != 0) signal_wakeup(wakeup_);
}

/// Clears the sign that this thread sleeps, because it found work first: peers need not signal the wakeup any more.
void RingPipe::awake() noexcept {
  std::atomic<uint32_t>& asleep = transport_.control().asleep[static_cast<size_t>(kind_)];
  if (asleep.load(std::memory_order_relaxed) != 0) asleep.store(0, std::memory_order_relaxed);
}

/// The place that follows a segment of so many bytes. No segment goes beyond the ring's end.
uint64_t RingPipe::after(uint64_t place, size_t bytes) const {
  const uint64_t next = place + (is_short(bytes) ? 0 : (bytes + 63) / 64 * 64), left = size_ - next % size_;
  return left < kPiece ? next + left : next;
}

/// Whether no segment that the peer has not read is in the way of the next. The peer may write any count into its
/// memory; an impossible one leaves no room.
bool RingPipe::has_room() const {
  const uint32_t sent = mine_.sent.load(std::memory_order_relaxed);
  const uint32_t received = theirs_.received.load(std::memory_order_seq_cst);
  if (sent == received) return true;
  return sent - received < slots_ && place_ + kPiece <= places_[received % slots_] + size_;
}

/// Whether to time the next copy of so many bytes, and to let the peer time its own.
bool RingPipe::times(uint32_t index, size_t bytes) {
  if (bytes < timed_bytes_) return false;
  const uint32_t unread = index - theirs_.received.load(std::memory_order_acquire);
  if (timed_ && unread < index - timed_->segment) {
    const auto both = timed_->time + std::chrono::nanoseconds(theirs_.copy_time.load(std::memory_order_relaxed));
    trial_.took(static_cast<double>(both.count()) / static_cast<double>(timed_->bytes));
    timed_.reset();
  }
  return !timed_ && trial_.times();
}

size_t RingPipe::write(const iovec* pieces, int n) noexcept {
  const size_t all = std::min(length(pieces, n), kAtOnce);
  size_t moved = 0, skip = 0;  // skip: of pieces[0]
  while (moved < all && has_room()) {
    const uint32_t index = mine_.sent.load(std::memory_order_relaxed);
    const size_t bytes = std::min(all - moved, kPiece);
    const bool timed = times(index, bytes);
    const bool past = bytes >= timed_bytes_ && trial_.way() != 0;
    const NextReader next = transport_.oversubscribed() ? NextReader::self
                            : past                      ? NextReader::nobody
                                                        : NextReader::peer;
    const auto began = timed ? Clock::now() : Clock::time_point{};
    std::byte* const slot = slots_to_peer_ + index % slots_ * RegionLayout::kSlotBytes;
    std::byte* const to = is_short(bytes) ? slot : ring_ + place_ % size_;
    for (size_t done = 0; done < bytes;) {
      const size_t part = std::min(pieces->iov_len - skip, bytes - done);
      const std::byte* const from = static_cast<const std::byte*>(pieces->iov_base) + skip;
      if (part <= kMostPeeked) {
        std::memcpy(to + done, from, part);
      } else {
        copy_bytes(to + done, from, part, next);
      }
      done += part;
      skip += part;
      if (skip == pieces->iov_len) ++pieces, skip = 0;
    }
    if (timed) timed_ = {index, bytes, Clock::now() - began};
    mine_.lengths[index % slots_].store(static_cast<uint32_t>(bytes) | (timed ? RingCounters::kTimed : 0),
                                        std::memory_order_relaxed);
    places_[index % slots_] = place_;
    place_ = after(place_, bytes);
    moved += bytes;
    publish(mine_.sent, index + 1);
  }
  if (moved == 0) return 0;
  awake();
  return moved;
}

/// The next unread byte, with left_ - 1 more behind it; null if none has arrived. The peer may write any length into its
/// memory: it is read once.
const std::byte* RingPipe::front() noexcept {
  if (left_ > 0) return unread_;
  const uint32_t received = mine_.received.load(std::memory_order_relaxed);
  if (theirs_.sent.load(std::memory_order_seq_cst) == received) return nullptr;
  const uint32_t told = theirs_.lengths[received % slots_].load(std::memory_order_relaxed);
  const size_t bytes = told & ~RingCounters::kTimed;
  if (bytes == 0 || bytes > kPiece) return nullptr;
  left_ = bytes;
  if (bytes != told) copy_time_ = std::chrono::nanoseconds(0);
  unread_ = is_short(left_) ? slots_from_peer_ + received % slots_ * RegionLayout::kSlotBytes
                            : peers_ring_ + peers_place_ % size_;
  peers_place_ = after(peers_place_, left_);
  // While the header of a frame is read.
  for (size_t at = kMostPeeked; at < std::min(left_, RegionLayout::kSlotBytes); at += 64)
    __builtin_prefetch(unread_ + at);
  return unread_;
}

void RingPipe::drop(size_t bytes) noexcept {
  unread_ += bytes;
  left_ -= bytes;
  if (left_ > 0) return;
  if (copy_time_) mine_.copy_time.store(static_cast<uint32_t>(copy_time_->count()), std::memory_order_relaxed);
  copy_time_.reset();
  publish(mine_.received, mine_.received.load(std::memory_order_relaxed) + 1);
  awake();
}

bool RingPipe::peek(void* to, size_t bytes) noexcept {
  const std::byte* const from = front();
  if (from == nullptr || left_ < bytes) return false;
  std::memcpy(to, from, bytes);
  return true;
}

size_t RingPipe::read(const iovec* pieces, int n) noexcept {
  size_t moved = 0;
  for (int i = 0; i < n; ++i) {
    for (size_t done = 0; done < pieces[i].iov_len;) {
      const std::byte* const from = moved < kAtOnce ? front() : nullptr;
      if (from == nullptr) return moved;
      const size_t bytes = std::min(pieces[i].iov_len - done, left_);
      const auto began = copy_time_ ? Clock::now() : Clock::time_point{};
      copy_bytes(static_cast<std::byte*>(pieces[i].iov_base) + done, from, bytes);
      if (copy_time_) *copy_time_ += Clock::now() - began;
      drop(bytes);
      done += bytes;
      moved += bytes;
    }
  }
  return moved;
}

bool RingPipe::ended() const noexcept {
  // In this order: a rank that sees the end also sees all bytes that were sent before.
  if (theirs_.finished.load(std::memory_order_seq_cst) == 0 && transport_.alive(peer_)) return false;
  return theirs_.sent.load(std::memory_order_seq_cst) == mine_.received.load(std::memory_order_relaxed);
}

std::string RingPipe::why_ended() const {
  if (theirs_.finished.load(std::memory_order_acquire) != 0) return "closed the connection";
  return transport_.alive(peer_) ? "has not ended" : "its process is gone";
}

void RingPipe::finish() noexcept {
  publish(mine_.finished, 1);
  publish(mine_.closed, 1);
}

bool RingPipe::delivered() noexcept {
  return theirs_.closed.load(std::memory_order_acquire) != 0 || all_read() || !transport_.alive(peer_);
}

}  // namespace ringlet
