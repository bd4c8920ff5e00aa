// A pipe between two ranks of one host: each puts segments of bytes into its region, which the peer reads in place.
//
// A short segment stands in one of few slots. Longer ones follow each other through a ring: when the sender writes a
// line again, its reader's nearest caches have dropped it. Now and then both time their copies, to find out whether the
// sender's go past the caches (docs/decisions/0062). The sender owns the bytes and the count
// of segments sent. The reader keeps the count of segments read in its own region, because a peer's memory is
// read-only. A rank that changes a count signals the peer's wakeup, if the peer has announced that it sleeps. The two
// also read each other's registered memory, by the addresses that they send.
// Ownership: the transport must outlive it. Thread safety: as Pipe; the counters from any thread.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "base/trial.h"
#include "transport/pipe.h"
#include "transport/transport.h"

namespace ringlet {

class RingPipe final : public Pipe {
 public:
  /// `peer` is a rank of `transport`, whose region has rings of that kind. Copies of `timed_bytes` and more are timed.
  RingPipe(Transport& transport, int peer, ConnectionKind kind, size_t timed_bytes);

  size_t write(const iovec* pieces, int n) noexcept override;
  size_t read(const iovec* pieces, int n) noexcept override;
  bool peek(void* to, size_t bytes) noexcept override;
  void drop(size_t bytes) noexcept override;
  bool ended() const noexcept override;
  std::string why_ended() const override;
  void finish() noexcept override;
  void close() noexcept override {}
  bool delivered() noexcept override;
  bool all_read() const noexcept override {
    return theirs_.received.load(std::memory_order_acquire) == mine_.sent.load(std::memory_order_relaxed);
  }
  std::optional<uint64_t> locate(const void* pointer, size_t bytes) const noexcept override {
    return transport_.locate(pointer, bytes);
  }
  const std::byte* peer_memory(uint64_t address) const noexcept override {
    return transport_.link(peer_).base + address;
  }
  void revoke_reads() noexcept override { transport_.control().withdrawn.store(1, std::memory_order_seq_cst); }
  bool withdrawn() const noexcept override {
    return transport_.control(peer_).withdrawn.load(std::memory_order_seq_cst) != 0;
  }
  int descriptor() const noexcept override { return transport_.watch(peer_); }

  ConnectionKind kind() const { return kind_; }

 private:
  // A way shows its speed only when most of the ring was written so.
  static constexpr Trial::Terms kTerms{
      .samples = 4, .settling = 32, .least_pause = 4096, .most_pause = 4096, .clearly = 0.9F, .first_pause = 64};
  struct Timed {
    uint32_t segment;
    size_t bytes;
    std::chrono::nanoseconds time;
  };

  uint64_t after(uint64_t place, size_t bytes) const;
  bool times(uint32_t index, size_t bytes);
  bool has_room() const;
  const std::byte* front() noexcept;
  void publish(std::atomic<uint32_t>& count, uint32_t value) noexcept;
  void awake() noexcept;

  Transport& transport_;
  const int peer_;
  const ConnectionKind kind_;
  const size_t timed_bytes_;
  const uint32_t slots_;
  const size_t size_;  // of the ring
  RingCounters& mine_;
  const RingCounters& theirs_;
  std::byte* const ring_;  // this rank's, to the peer
  std::byte* const slots_to_peer_;
  const std::byte* const peers_ring_;  // the peer's, to this rank
  const std::byte* const slots_from_peer_;
  const int wakeup_;  // the peer's
  const std::atomic<uint32_t>& asleep_;
  // Places are bytes since the ring was made, those that were left out at its end included.
  uint64_t place_ = 0;                                   // of the next long segment
  std::vector<uint64_t> places_;                         // the same before each of the last segments
  Trial trial_{2, kTerms};                               // through the caches, or past them
  std::optional<Timed> timed_{};                         // by this rank, and not yet by the peer
  uint64_t peers_place_ = 0;                             // of the peer's next long segment
  const std::byte* unread_ = nullptr;                    // of the segment being read: its next byte,
  size_t left_ = 0;                                      // and how many
  std::optional<std::chrono::nanoseconds> copy_time_{};  // if that segment is timed
};

}  // namespace ringlet
