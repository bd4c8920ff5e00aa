#include "transport/ring_pipe.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "base/system_call.h"

namespace ringlet {
namespace {

// The count of bytes is published after each piece, so that the reader copies one while the writer copies the next.
constexpr size_t kPiece = size_t{64} << 10;

int ring_index(ConnectionKind which) { return which == ConnectionKind::collectives ? 0 : 1; }

ConnectionKind facing(ConnectionKind which) {
  switch (which) {
    case ConnectionKind::outgoing: return ConnectionKind::incoming;
    case ConnectionKind::incoming: return ConnectionKind::outgoing;
    default: return ConnectionKind::collectives;
  }
}

size_t slot(ConnectionKind which) { return static_cast<size_t>(which); }

/// Copies between the ring and `pieces`, in order, until `most` bytes are moved; `copy(piece, offset in the ring,
/// bytes)`.
template <typename Copy>
size_t walk(const iovec* pieces, int n, size_t most, Copy copy) {
  size_t moved = 0;
  for (int i = 0; i < n && moved < most; ++i) {
    for (size_t done = 0; done < pieces[i].iov_len && moved < most;) {
      const size_t bytes =
          copy(static_cast<std::byte*>(pieces[i].iov_base) + done, std::min(pieces[i].iov_len - done, most - moved));
      done += bytes;
      moved += bytes;
    }
  }
  return moved;
}

}  // namespace

void signal_wakeup(int wakeup) noexcept {
  const uint64_t one = 1;
  // The write fails only if the counter is full, and then the sleeper wakes anyway.
  [[maybe_unused]] const ssize_t written = repeated([&] { return ::write(wakeup, &one, sizeof one); });
}

RingPipe::RingPipe(Transport& transport, int peer, ConnectionKind which)
    : transport_(transport),
      peer_(peer),
      which_(which),
      size_(static_cast<uint32_t>(transport.layout().ring_bytes(ring_index(which)))),
      mine_(transport.channel(peer).rings[ring_index(which)]),
      theirs_(transport.channel_of(peer, transport.rank()).rings[ring_index(which)]),
      over_(which == ConnectionKind::outgoing ? theirs_.closed : theirs_.finished),
      outgoing_(transport.region() + transport.layout().ring(peer, ring_index(which))),
      incoming_(transport.link(peer).region + transport.layout().ring(transport.rank(), ring_index(which))),
      wakeup_(transport.wakeup(peer, facing(which))),
      asleep_(transport.control(peer).asleep[slot(facing(which))]) {}

/// Each side first writes its own word and then reads the other's, sequentially consistently, so no wake-up is missed.
void RingPipe::publish(std::atomic<uint32_t>& count, uint32_t value) noexcept {
  count.store(value, std::memory_order_seq_cst);
  if (asleep_.load(std::memory_order_seq_cst) != 0) signal_wakeup(wakeup_);
}

/// Clears the sign that this thread sleeps, because it found work first: peers need not signal the wakeup any more.
void RingPipe::awake() noexcept {
  std::atomic<uint32_t>& asleep = transport_.control().asleep[slot(which_)];
  if (asleep.load(std::memory_order_relaxed) != 0) asleep.store(0, std::memory_order_relaxed);
}

size_t RingPipe::write(const iovec* pieces, int n) noexcept {
  if (which_ == ConnectionKind::incoming) return 0;
  uint32_t sent = mine_.sent.load(std::memory_order_relaxed), published = sent;
  const uint32_t unread = sent - theirs_.received.load(std::memory_order_seq_cst);
  // The peer may write any count into its memory. An impossible count must not lead to an access outside of the ring.
  const size_t room = unread > size_ ? 0 : size_ - unread;
  const size_t moved = walk(pieces, n, room, [&](const std::byte* from, size_t bytes) {
    const uint32_t at = sent % size_;
    bytes = std::min<size_t>({bytes, size_ - at, kPiece});
    std::memcpy(outgoing_ + at, from, bytes);
    sent += static_cast<uint32_t>(bytes);
    if (sent - published >= kPiece) publish(mine_.sent, published = sent);
    return bytes;
  });
  if (moved == 0) return 0;
  if (sent != published) publish(mine_.sent, sent);
  awake();
  written_.store(written_.load(std::memory_order_relaxed) + moved, std::memory_order_relaxed);
  return moved;
}

size_t RingPipe::read(const iovec* pieces, int n) noexcept {
  if (which_ == ConnectionKind::outgoing) return 0;
  uint32_t received = mine_.received.load(std::memory_order_relaxed), published = received;
  const uint32_t unread = theirs_.sent.load(std::memory_order_seq_cst) - received;
  const size_t moved = walk(pieces, n, std::min(unread, size_), [&](std::byte* to, size_t bytes) {
    const uint32_t at = received % size_;
    bytes = std::min<size_t>({bytes, size_ - at, kPiece});
    std::memcpy(to, incoming_ + at, bytes);
    received += static_cast<uint32_t>(bytes);
    if (received - published >= kPiece) publish(mine_.received, published = received);
    return bytes;
  });
  if (moved == 0) return 0;
  if (received != published) publish(mine_.received, received);
  awake();
  read_.store(read_.load(std::memory_order_relaxed) + moved, std::memory_order_relaxed);
  return moved;
}

bool RingPipe::ended() const noexcept {
  // In this order: a rank that sees the end also sees all bytes that were sent before.
  if (over_.load(std::memory_order_seq_cst) == 0 && transport_.alive(peer_)) return false;
  return which_ == ConnectionKind::outgoing ||
         theirs_.sent.load(std::memory_order_seq_cst) == mine_.received.load(std::memory_order_relaxed);
}

std::string RingPipe::why_ended() const {
  if (over_.load(std::memory_order_acquire) != 0) return "closed the connection";
  return transport_.alive(peer_) ? "has not ended" : "its process is gone";
}

void RingPipe::finish() noexcept {
  if (which_ != ConnectionKind::incoming) publish(mine_.finished, 1);
  if (which_ != ConnectionKind::outgoing) publish(mine_.closed, 1);
}

bool RingPipe::delivered() noexcept {
  return which_ == ConnectionKind::incoming || theirs_.closed.load(std::memory_order_acquire) != 0 ||
         theirs_.received.load(std::memory_order_acquire) == mine_.sent.load(std::memory_order_relaxed) ||
         !transport_.alive(peer_);
}

}  // namespace ringlet
