// How the ranks of a group reach each other's memory. All addresses are set when the group is made, so an engine asks
// nothing per step.
//
// Every rank owns one region: its control page, a channel per peer, and staging buffers. Peers see it at
// link(q).region. Rank q's memory with the *registered address* a lies at link(q).base + a in this process.
// Ownership: the transport keeps all mappings alive. Thread safety: const calls from any thread.
#pragma once

#include <sched.h>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "memory/mapping.h"
#include "transport/control.h"

namespace ringlet {

/// What a thread sleeps on until a peer signals it: an eventfd. Throws ResourceError.
Descriptor make_wakeup();
/// Wakes the threads that sleep on it. Does nothing if it is -1.
void signal_wakeup(int wakeup) noexcept;
/// Takes the signals back that have come: it sleeps again.
void drain_wakeup(int wakeup) noexcept;

struct Link {
  const std::byte* region = nullptr;
  const std::byte* base = nullptr;
};

/// Which connections between ranks are rings in their regions.
enum class Rings : uint8_t {
  messages,  ///< collectives go through staging buffers, or are read in place
  all,       ///< of a group with ranks on other hosts, too
};

/// The layout of a region; the same for all ranks of a group.
struct RegionLayout {
  // Staging buffers of successive segments follow each other through this many bytes, and then start again. A staging
  // buffer that is soon overwritten is still in its readers' caches. To take lines back from there costs twice as much
  // as to take them from a shared cache.
  static constexpr size_t kStagingBytes = size_t{4} << 20;  ///< room for the staging buffers of one rank of one group
  static constexpr size_t kControlBytes = 4096;
  static constexpr size_t kRingBytes = size_t{512} << 10;        // of collectives
  static constexpr size_t kMessagesBytes = size_t{2} << 20;      ///< room for segments of messages that a peer has not
                                                                 ///< taken
  static constexpr size_t kAllMessagesBytes = size_t{16} << 20;  ///< the same for all peers, if it is less (but 512 KiB
                                                                 ///< for each)
  static constexpr size_t kShortBytes = size_t{1} << 10;  ///< up to this size a payload stands with its header in a
                                                          ///< slot
  static constexpr size_t kSlotBytes = Pipe::kMostPeeked + kShortBytes;

  RegionLayout(int world, Rings rings) : world(world), rings(rings) {}
  size_t channel(int peer) const { return kControlBytes + static_cast<size_t>(peer) * sizeof(Channel); }
  size_t staging() const { return (channel(world) + 4095) / 4096 * 4096; }

  bool has_ring(ConnectionKind kind) const { return kind == ConnectionKind::messages || rings == Rings::all; }
  /// The ring to one peer: so many bytes, a power of two, through which long segments follow each other.
  size_t ring_bytes(ConnectionKind kind) const {
    if (kind == ConnectionKind::collectives) return kRingBytes;
    return std::clamp(std::bit_floor(kAllMessagesBytes / static_cast<size_t>(world)), kRingBytes, kMessagesBytes);
  }
  size_t ring(ConnectionKind kind, int peer) const {
    return all_rings(kind) + static_cast<size_t>(peer) * ring_bytes(kind);
  }
  /// And its slots, for segments that fit. They are few, so that they stay in both caches, and as many segments may be
  /// under way.
  static constexpr uint32_t slots(ConnectionKind kind) { return kind == ConnectionKind::messages ? 8 : 16; }
  size_t slot(ConnectionKind kind, int peer, uint32_t index) const {
    const size_t before = static_cast<size_t>(peer) * slots(kind) + index % slots(kind);
    return ring(kind, world) + before * kSlotBytes;
  }
  size_t bytes() const {
    return slot(rings == Rings::all ? ConnectionKind::collectives : ConnectionKind::messages, world, 0);
  }

  int world;
  Rings rings;

 private:
  size_t all_rings(ConnectionKind kind) const {
    if (kind == ConnectionKind::collectives) return slot(ConnectionKind::messages, world, 0);
    return staging() + (rings == Rings::all ? 0 : kStagingBytes);
  }
};

class Transport {
 public:
  Transport(int rank, int world, Rings rings = Rings::messages)
      : layout_(world, rings), rank_(rank), world_(world), links_(world) {}
  virtual ~Transport() = default;
  Transport(const Transport&) = delete;
  Transport& operator=(const Transport&) = delete;

  virtual const char* name() const noexcept = 0;

  /// The registered address of [pointer, pointer + bytes); none if peers cannot reach it.
  virtual std::optional<uint64_t> locate(const void* pointer, size_t bytes) const noexcept = 0;

  /// Whether peers reach tensors that their owner may unmap when its call has failed.
  virtual bool unmaps_tensors() const noexcept { return false; }

  /// Whether the peer's process (or thread) still runs. Costs a system call.
  virtual bool alive(int peer) const noexcept = 0;

  /// A descriptor that becomes readable when the peer's process ends; -1 if there is none.
  virtual int watch(int) const noexcept { return -1; }

  /// The eventfd that wakes the threads of that rank that sleep on that kind; -1 if its connections are no rings.
  virtual int wakeup(int rank, ConnectionKind) const noexcept = 0;

  /// Frees the memory of the staging buffers, when no peer will read them any more. The control page stays: a peer that
  /// looks late must still see that this rank left.
  virtual void retire() noexcept {}

  /// The last call, except name() and locate(); no other call may be in progress. From then on this rank looks at no
  /// region. Its own region stays until all peers have departed or their processes are gone.
  virtual void depart() noexcept { links_.assign(links_.size(), Link{}); }

  /// Whether ranks must share processors: then a waiting rank yields at once. The same on all ranks, because it decides
  /// where their staging buffers are.
  bool oversubscribed() const { return oversubscribed_; }
  /// There are at least two processors for each rank, and each may use two. The same on all ranks, because the reducer
  /// decides by it when it sends.
  bool has_spare_processor() const { return spare_; }

  int rank() const { return rank_; }
  int world() const { return world_; }
  const Link& link(int peer) const { return links_[peer]; }
  const RegionLayout& layout() const { return layout_; }
  std::byte* region() const { return const_cast<std::byte*>(links_[rank_].region); }
  Control& control() const { return *reinterpret_cast<Control*>(region()); }
  const Control& control(int peer) const { return *reinterpret_cast<const Control*>(links_[peer].region); }
  Channel& channel(int peer) const { return *reinterpret_cast<Channel*>(region() + layout_.channel(peer)); }
  const Channel& channel_of(int owner, int peer) const {
    return *reinterpret_cast<const Channel*>(links_[owner].region + layout_.channel(peer));
  }

 protected:
  /// By rank, what each may use when the group is made.
  void count_processors(const std::vector<cpu_set_t>& usable);

  RegionLayout layout_;
  int rank_;
  int world_;
  std::vector<Link> links_;
  bool oversubscribed_ = false;
  bool spare_ = false;
};

}  // namespace ringlet
