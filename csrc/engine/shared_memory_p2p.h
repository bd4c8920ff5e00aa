// The P2P transport of a host: messages go through segments of the sender's region, or in place from registered memory.
//
// Ownership: transport and waiter outlive it. Thread safety: p2p_transport.h.
#pragma once

#include "engine/p2p_transport.h"
#include "engine/pull/hand_over.h"
#include "transport/transport.h"

namespace ringlet {

class SharedMemoryP2p final : public P2pTransport {
 public:
  SharedMemoryP2p(Transport& transport, Waiter& waiter, const Tuning& tuning)
      : transport_(transport), waiter_(waiter), hand_over_(tuning) {}

  int rank() const override { return transport_.rank(); }
  int world() const override { return transport_.world(); }
  int spins(bool background) const override { return waiter_.spins(background); }

  bool send(const Message& message, MessageProgress& progress) override;
  std::optional<Envelope> next(int peer) override;
  bool receive(int peer, std::byte* to, size_t bytes, MessageProgress& progress) override;

  void watch(int peer, bool sending, Watchlist& list) override;
  void sleep(const Watchlist& list, int64_t nanoseconds) override;

  void tell_waiting(const std::string& context) override { waiter_.tell_message(context); }
  void examine(const Waiting& waiting, const Deadline& deadline, bool closely) override;
  void raise_if_failed() override;
  [[noreturn]] void fail(ErrorKind kind, const std::string& message) override;

  /// Whether every message that was sent has left this rank's region.
  bool all_taken() const;

 private:
  const StagingHeader* header(int peer) const;
  std::string context(int peer, const StagingHeader& segment, size_t done) const;
  void put(const Message& message, MessageProgress& progress, uint64_t address, size_t piece);

  Transport& transport_;
  Waiter& waiter_;
  HandOver hand_over_;
};

}  // namespace ringlet
