// A pipe between two processes of one host: each has a ring of bytes in its region, which the peer reads in place.
//
// The sender owns the bytes and the count of bytes sent. The reader keeps the count of bytes read in its own region,
// because a peer's memory is read-only. A rank that changes a count signals the peer's wakeup, if the peer has
// announced that it sleeps. The two also read each other's registered memory, by the addresses that they send.
// Ownership: the transport must outlive it. Thread safety: as Pipe; the counters from any thread.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

#include "transport/pipe.h"
#include "transport/transport.h"

namespace ringlet {

/// Wakes the thread that sleeps on an eventfd. Does nothing if it is -1.
void signal_wakeup(int wakeup) noexcept;

class RingPipe final : public Pipe {
 public:
  /// `peer` is a rank of `transport`, which has wakeups.
  RingPipe(Transport& transport, int peer, ConnectionKind which);

  size_t write(const iovec* pieces, int n) noexcept override;
  size_t read(const iovec* pieces, int n) noexcept override;
  bool ended() const noexcept override;
  std::string why_ended() const override;
  void finish() noexcept override;
  void close() noexcept override {}
  bool delivered() noexcept override;
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
  uint64_t bytes_written() const noexcept override { return written_.load(std::memory_order_relaxed); }
  uint64_t bytes_read() const noexcept override { return read_.load(std::memory_order_relaxed); }

  ConnectionKind which() const { return which_; }

 private:
  void publish(std::atomic<uint32_t>& count, uint32_t value) noexcept;
  void awake() noexcept;

  Transport& transport_;
  const int peer_;
  const ConnectionKind which_;
  const uint32_t size_;
  RingCounters& mine_;
  const RingCounters& theirs_;
  const std::atomic<uint32_t>& over_;  // the peer has closed the pipe
  std::byte* const outgoing_;          // this rank's ring to the peer
  const std::byte* const incoming_;    // the peer's to this rank
  const int wakeup_;                   // the peer's, of the kind that faces this one
  const std::atomic<uint32_t>& asleep_;
  std::atomic<uint64_t> written_{0};
  std::atomic<uint64_t> read_{0};
};

}  // namespace ringlet
