// The pull engine: its ranks read each other's memory. They are threads of one process, or processes of one host.
//
// Ownership: owns the transport. Thread safety: engine.h.
#pragma once

#include <memory>

#include "engine/engine.h"
#include "engine/pull/pull_executor.h"
#include "engine/pull/wait.h"
#include "engine/selector.h"
#include "engine/shared_memory_p2p.h"
#include "transport/transport.h"

namespace ringlet {

class PullEngine final : public Engine {
 public:
  explicit PullEngine(std::unique_ptr<Transport> transport, Selector selector = Selector())
      : Engine(transport->rank(), transport->world(), waiter_, /*over_network=*/false),
        transport_(std::move(transport)),
        selector_(std::move(selector)),
        waiter_(*transport_, health()),
        pull_(*transport_, waiter_, selector_),
        p2p_(*transport_, waiter_, selector_.tuning()),
        hosts_(static_cast<size_t>(transport_->world()), 0) {}

  const char* transport() const noexcept override { return transport_->name(); }
  void run(const Call& call, bool background) override { pull_.run(call, background); }
  bool resumable() const noexcept override { return true; }
  bool advance(const Call& call, bool spin) override { return pull_.advance(call, spin); }
  Awaited held_up_at() const override { return pull_.held_up_at(); }
  void sleep(const Awaited& awaited, std::chrono::nanoseconds most) noexcept override {
    waiter_.sleep_on_peer(awaited.peer, awaited.target, most.count());
  }
  bool has_spare_processor() const noexcept override { return transport_->has_spare_processor(); }
  bool is_awaited() const noexcept override { return waiter_.is_awaited(); }
  const Algorithm& algorithm_for(Collective collective, size_t bytes, bool registered) const override {
    return pull_.algorithm_for(collective, bytes, registered);
  }
  const Selector& selector() const noexcept override { return selector_; }
  P2pTransport& p2p() override { return p2p_; }
  bool registered(const void* pointer, size_t bytes) const noexcept override {
    return transport_->locate(pointer, bytes).has_value();
  }
  const std::vector<int>& host_of_rank() const noexcept override { return hosts_; }
  uint64_t bytes_received() const noexcept override { return pull_.bytes_read(); }
  void leave(bool quiet, std::chrono::milliseconds patience) override {
    // Peers may still read this rank's staging buffers. If they do not finish in time, this rank does not free the
    // staging buffers.
    const Leaving leaving{*this};
    if (quiet && p2p_.all_taken() && pull_.quiesce(patience)) transport_->retire();
  }

 private:
  /// Departs at the end of its scope, even if an interrupt ends the scope.
  struct Leaving {
    ~Leaving() {
      engine.health().leave();
      engine.waiter_.depart();
    }
    PullEngine& engine;
  };

  std::unique_ptr<Transport> transport_;
  const Selector selector_;
  Waiter waiter_;
  PullExecutor pull_;
  SharedMemoryP2p p2p_;
  std::vector<int> hosts_;
};

}  // namespace ringlet
