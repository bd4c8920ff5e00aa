// Messages through slabs of the sender's region, or in place from registered memory.
//
// Ownership: transport and waiter outlive it. Thread safety: lanes.h.
#pragma once

#include "engine/lanes.h"
#include "transport/transport.h"

namespace ringlet {

class SlotLanes final : public Lanes {
 public:
  SlotLanes(Transport& transport, Waiter& waiter) : transport_(transport), waiter_(waiter) {}

  int rank() const override { return transport_.rank(); }
  int world() const override { return transport_.world(); }
  int spins(bool patient) const override { return waiter_.spins(patient); }

  bool send(const Message& message, Moved& moved) override;
  std::optional<MessageTitle> next(int peer) override;
  bool receive(int peer, std::byte* to, size_t bytes, Moved& moved) override;

  void watch(int peer, bool sending, Watchlist& list) override;
  void sleep(const Watchlist& list, int64_t nanoseconds) override;

  void tell_waiting(const std::string& story) override { waiter_.tell_message(story); }
  void examine(const Waiting& waiting, const Deadline& deadline, bool closely) override;
  void raise_if_failed() override;
  [[noreturn]] void fail(ErrorKind kind, const std::string& message) override;

  /// Whether every message that was sent has left this rank's region.
  bool all_taken() const;

 private:
  const SlabHeader* header(int peer) const;
  std::string story(int peer, const SlabHeader& slab, size_t done) const;
  void put(const Message& message, Moved& moved, uint64_t address, size_t piece);

  Transport& transport_;
  Waiter& waiter_;
};

}  // namespace ringlet
