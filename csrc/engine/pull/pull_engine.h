// The pull engine: its ranks read each other's memory. They are threads of one process, or processes of one host.
//
// Ownership: shares the transport with the mesh, which messages go through. Thread safety: engine.h.
#pragma once

#include <memory>

#include "engine/engine.h"
#include "engine/p2p.h"
#include "engine/pull/peer_reads.h"
#include "engine/pull/pull_executor.h"
#include "engine/pull/wait.h"
#include "engine/selector.h"
#include "transport/transport.h"

namespace ringlet {

/// Messages in memory that the receiver reads in place.
class PullP2p final : public P2p {
 public:
  PullP2p(Transport& transport, Mesh& mesh, Waiter& waiter)
      : P2p(mesh, waiter.health(), waiter.spins(false)), transport_(transport) {}

 protected:
  std::optional<uint64_t> locate(int, const Message& message) const override {
    return transport_.locate(message.data, message.bytes());
  }
  void read_in_place(int peer, uint64_t address, std::byte* to, size_t bytes,
                     const std::function<std::string()>& context) override {
    const std::byte* const from = transport_.link(peer).base + address;
    // The peer may have failed long ago, and its tensor may be no memory any more.
    while (!read_tensor(transport_, peer, [&] { copy_bytes(to, from, bytes); })) {
      confirm(transport_, health(), peer, context);
    }
    confirm(transport_, health(), peer, context);
  }

 private:
  Transport& transport_;
};

class PullEngine final : public Engine {
 public:
  explicit PullEngine(std::shared_ptr<Transport> transport, Selector selector = Selector())
      : Engine(transport->rank(), transport->world(), waiter_, /*over_network=*/false),
        transport_(std::move(transport)),
        selector_(std::move(selector)),
        waiter_(*transport_, health()),
        pull_(*transport_, waiter_, selector_),
        hosts_(static_cast<size_t>(transport_->world()), 0),
        mesh_({.rank = rank(),
               .world = world(),
               .hosts = hosts_,
               .local = transport_,
               .timed_copy_bytes = selector_.tuning().timed_copy_bytes}),
        p2p_(*transport_, mesh_, waiter_) {}

  const char* transport() const noexcept override { return transport_->name(); }
  void run(const Call& call, bool background) override { pull_.run(call, background); }
  bool advance(const Call& call, bool spin, Awaited* awaited) override { return pull_.advance(call, spin, awaited); }
  void sleep(const Awaited& awaited, std::chrono::nanoseconds most) noexcept override {
    waiter_.sleep_on_peer(awaited.peer, awaited.target, most);
  }
  bool overlaps() const noexcept override { return transport_->has_spare_processor(); }
  bool is_awaited() const noexcept override { return waiter_.is_awaited(); }
  const Algorithm& algorithm_for(Collective collective, size_t bytes, bool registered) const override {
    return pull_.algorithm_for(collective, bytes, registered);
  }
  const Selector& selector() const noexcept override { return selector_; }
  P2p& p2p() override { return p2p_; }
  bool registered(const void* pointer, size_t bytes) const noexcept override {
    return transport_->locate(pointer, bytes).has_value();
  }
  const std::vector<int>& host_of_rank() const noexcept override { return hosts_; }
  uint64_t bytes_received() const noexcept override { return pull_.bytes_read(); }
  void leave(bool quiet, std::chrono::milliseconds patience) override {
    // Peers may still read this rank's staging buffers. If they do not finish in time, this rank does not free the
    // staging buffers.
    const Departing departing{*this};
    if (quiet && mesh_.delivered() && pull_.quiesce(patience)) transport_->retire();
  }

 private:
  /// Departs at the end of its scope, even if an interrupt ends the scope.
  struct Departing {
    ~Departing() {
      engine.health().leave();
      engine.mesh_.close(Deadline::after(std::chrono::milliseconds(0)));
      engine.waiter_.depart();
    }
    PullEngine& engine;
  };

  std::shared_ptr<Transport> transport_;
  const Selector selector_;
  Waiter waiter_;
  PullExecutor pull_;
  const std::vector<int> hosts_;
  Mesh mesh_;
  PullP2p p2p_;
};

}  // namespace ringlet
