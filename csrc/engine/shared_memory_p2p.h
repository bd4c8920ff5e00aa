// The P2P transport of a host: messages go through segments of the sender's region, or in place from registered memory.
//
// Ownership: transport and waiter outlive it. Thread safety: p2p_transport.h.
#pragma once

#include <chrono>
#include <vector>

#include "engine/p2p_transport.h"
#include "engine/pull/wait.h"
#include "engine/trial.h"
#include "engine/tuning.h"
#include "transport/transport.h"

namespace ringlet {

class SharedMemoryP2p final : public P2pTransport {
 public:
  SharedMemoryP2p(Transport& transport, Waiter& waiter, const Tuning& tuning)
      : P2pTransport(waiter.health()),
        transport_(transport),
        waiter_(waiter),
        timed_bytes_(tuning.timed_copy_bytes),
        area_(transport.oversubscribed() ? kAreaInTurns : transport.layout().messages_bytes()),
        outgoing_(static_cast<size_t>(transport.world())),
        incoming_(static_cast<size_t>(transport.world())) {}

  int spins(bool background) const override { return waiter_.spins(background); }

  bool send(const Message& message, MessageProgress& progress) override;
  std::optional<Envelope> next(int peer) override;
  bool receive(int peer, std::byte* to, size_t bytes, MessageProgress& progress) override;

  void watch(int peer, bool sending, Watchlist& list) override;
  void sleep(const Watchlist& list, int64_t nanoseconds) override;

  /// Whether every message that was sent has left this rank's region.
  bool all_taken() const;

 private:
  /// Segments to a peer. Places are bytes since the group was made, those that were left out at an area's end included.
  struct Outgoing {
    // A way shows its speed only when most of the area was written so.
    static constexpr Trial::Terms kTerms{
        .samples = 4, .settling = 32, .least_pause = 64, .most_pause = 2048, .clearly = 0.9F};
    uint64_t place = 0;                              // of the next segment that is not short
    uint64_t places[RegionLayout::kSegments] = {0};  // the same before each of the last segments
    Trial trial{2, kTerms};                          // through the caches, or past them
    bool timing = false;                             // a copy of these:
    uint32_t segment = 0;
    size_t bytes = 0;
    std::chrono::nanoseconds time{0};
  };

  // Ranks that share a processor share its cache, too: all segments for a peer should stay in that cache.
  static constexpr size_t kAreaInTurns = size_t{256} << 10;

  uint64_t after(uint64_t place, size_t bytes) const;
  bool has_room(int peer) const;
  const StagingHeader* header(int peer) const;
  std::string context(int peer, const StagingHeader& segment, size_t done) const;
  bool copy(int peer, uint32_t index, std::byte* to, const std::byte* from, size_t bytes);
  void put(const Message& message, MessageProgress& progress, uint64_t address, size_t piece);

  Transport& transport_;
  Waiter& waiter_;
  const size_t timed_bytes_;
  const size_t area_;               // bytes of all segments for a peer
  std::vector<Outgoing> outgoing_;  // by peer
  std::vector<uint64_t> incoming_;  // by peer: the place of the next segment that is not short
};

}  // namespace ringlet
