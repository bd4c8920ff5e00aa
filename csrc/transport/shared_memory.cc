#include "transport/shared_memory.h"

#include <unistd.h>

#include <atomic>
#include <cstring>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/process.h"
#include "base/processor.h"
#include "base/system_call.h"
#include "memory/heap.h"
#include "transport/address.h"
#include "transport/handshake.h"

namespace ringlet {

namespace {

/// What a rank publishes in the store.
struct RegionInfo {
  uint64_t host;
  uint64_t heap_id;
  uint64_t heap_bytes;
  uint64_t region;
  uint64_t presence;     // the offset of the counter by which this rank departs
  uint64_t present;      // its value until then
  cpu_set_t processors;  // that the rank may use
  Token token;
  char socket_name[64];
};

/// The heap of a peer is mapped once per process, for all groups.
std::shared_ptr<const Mapping> map_heap(uint64_t id, const Descriptor& descriptor, size_t bytes) {
  struct Shared {
    std::mutex mutex;
    std::map<uint64_t, std::weak_ptr<const Mapping>> known;
  };
  static constinit OfProcess<Shared> of_process;
  auto& [mutex, known] = of_process.get();
  const std::lock_guard lock(mutex);
  std::shared_ptr<const Mapping> mapping = known[id].lock();
  if (!mapping) {
    std::erase_if(known, [](const auto& each) { return each.second.expired(); });
    mapping = std::make_shared<const Mapping>(descriptor.get(), bytes, Mapping::Access::read_only);
    known[id] = mapping;
  }
  return mapping;
}

bool is_readable(const Descriptor& descriptor) noexcept { return events_now(descriptor.get(), POLLIN) != 0; }

/// Another rank of the group.
struct Peer {
  Descriptor watch{};  // readable when its process has ended; none: the peer never got this rank's region
  Descriptor held{};   // which the peer watches
  std::shared_ptr<const Mapping> heap{};
  const std::atomic<uint64_t>* presence = nullptr;
  uint64_t present = 0;

  /// Whether the peer does not read this rank's region any more.
  bool departed() const noexcept {
    return !watch.valid() || (presence != nullptr && presence->load(std::memory_order_acquire) != present) ||
           is_readable(watch);
  }
};

/// A region is freed when no peer reads it any more (docs/decisions/0042). Each rank shows that by a counter, which it
/// moves on when it departs. The counter outlives the region, because another group's region may follow at its place.
class SharedMemory final : public Transport {
 public:
  SharedMemory(int rank, int world, Rings rings)
      : Transport(rank, world, rings),
        heap_(Heap::process()),
        peers_(std::make_shared<std::vector<Peer>>(world)),
        wakeups_(world) {}
  ~SharedMemory() override { depart(); }

  void connect(Store& store, const std::string& name, const Deadline& deadline) {
    make_region();
    for (const ConnectionKind kind : kConnectionKinds) {
      if (layout_.has_ring(kind)) wakeups_[rank_].push_back(make_wakeup());
    }
    Handshake handshake(rank_, world_);
    const RegionInfo mine = own_info(handshake);
    const std::string place = name + "/region", own_key = place + "/" + std::to_string(rank_);
    store.set(own_key, std::string(reinterpret_cast<const char*>(&mine), sizeof mine));
    const std::vector<std::string> told = from_all_ranks(store, place, rank_, world_, deadline);
    std::vector<RegionInfo> infos(world_);
    for (int q = 0; q < world_; ++q) infos[q] = q == rank_ ? mine : read_info(told[q], q, mine.host);
    exchange(handshake, infos, deadline, [&] { store.raise_failure(); });
    store.forget(own_key);  // every rank that joined this one has read all infos
    std::vector<cpu_set_t> processors;
    for (const RegionInfo& info : infos) processors.push_back(info.processors);
    count_processors(processors);
  }

  const char* name() const noexcept override { return "shared_memory"; }
  std::optional<uint64_t> locate(const void* pointer, size_t bytes) const noexcept override {
    return heap_->locate(pointer, bytes);
  }
  bool alive(int peer) const noexcept override { return peer == rank_ || !is_readable((*peers_)[peer].watch); }
  int watch(int peer) const noexcept override { return (*peers_)[peer].watch.get(); }
  int wakeup(int rank, ConnectionKind kind) const noexcept override {
    return layout_.has_ring(kind) ? wakeups_[rank][static_cast<size_t>(kind)].get() : -1;
  }
  void retire() noexcept override { heap_->discard(region_ + layout_.staging(), layout_.bytes() - layout_.staging()); }

  void depart() noexcept override {
    if (region_ == nullptr) return;
    Transport::depart();
    if (presence_ != nullptr) heap_->drop_counter(*presence_);
    region_ = nullptr;
    heap_->free_when(std::move(retirement_));
  }

 private:
  RegionInfo read_info(const std::string& text, int rank, uint64_t host) const {
    RegionInfo info;
    if (text.size() != sizeof info) {
      throw InvalidUsage(
          "rank " + std::to_string(rank) +
          " published a region that this version of ringlet cannot read: install the same version for all ranks");
    }
    std::memcpy(&info, text.data(), sizeof info);
    if (info.host != host) {
      throw InvalidUsage(
          "rank " + std::to_string(rank) + " and rank " + std::to_string(rank_) +
          " are not on one host (or not in one network namespace); shared_memory joins the ranks of one host");
    }
    return info;
  }

  void make_region() {
    retirement_.push_back({nullptr, [readers = peers_] {
                             std::erase_if(*readers, [](const Peer& peer) { return peer.departed(); });
                             return readers->empty();
                           }});
    region_ = retirement_.front().pointer = heap_->allocate(layout_.bytes());
    presence_ = &heap_->take_counter();
    // A reused block of the heap holds old bytes. The counters must be zero before a peer reads them.
    std::memset(region_, 0, layout_.staging());
    links_[rank_] = {region_, heap_->base()};
  }

  RegionInfo own_info(const Handshake& handshake) const {
    RegionInfo mine{};
    mine.host = host_identity();
    mine.heap_id = heap_->id();
    mine.heap_bytes = heap_->bytes();
    mine.region = *heap_->locate(region_, 1);
    mine.presence = *heap_->locate(presence_, sizeof *presence_);
    mine.present = presence_->load(std::memory_order_relaxed);
    mine.processors = usable_processors();
    mine.token = handshake.token();
    std::strncpy(mine.socket_name, handshake.name().c_str(), sizeof mine.socket_name - 1);
    return mine;
  }

  void exchange(Handshake& handshake, const std::vector<RegionInfo>& infos, const Deadline& deadline,
                const std::function<void()>& look) {
    std::vector<Handshake::Peer> addresses;
    for (const RegionInfo& each : infos) addresses.push_back({each.socket_name, each.token});
    const Descriptor own = heap_->read_only_descriptor();
    std::vector<int> handed{own.get()};
    for (const Descriptor& wakeup : wakeups_[rank_]) handed.push_back(wakeup.get());
    std::vector<Introduced> joined(world_);
    try {
      handshake.exchange(addresses, handed, joined, deadline, look);
    } catch (...) {
      adopt(joined, infos);
      throw;
    }
    adopt(joined, infos);
  }

  /// From here on, the peers that have joined count as readers of this rank's region.
  void adopt(std::vector<Introduced>& joined, const std::vector<RegionInfo>& infos) {
    std::vector<Peer>& peers = *peers_;
    for (int q = 0; q < world_; ++q) {
      peers[q].watch = std::move(joined[q].watch);
      peers[q].held = std::move(joined[q].held);
    }
    for (int q = 0; q < world_; ++q) {
      if (!joined[q].heap.valid()) continue;
      const std::shared_ptr<const Mapping> heap = map_heap(infos[q].heap_id, joined[q].heap, infos[q].heap_bytes);
      peers[q].presence = reinterpret_cast<const std::atomic<uint64_t>*>(heap->base() + infos[q].presence);
      peers[q].present = infos[q].present;
      wakeups_[q] = std::move(joined[q].wakeups);
      links_[q] = {heap->base() + infos[q].region, heap->base()};
      peers[q].heap = heap;
    }
  }

  std::shared_ptr<Heap> heap_;
  std::byte* region_ = nullptr;
  std::atomic<uint64_t>* presence_ = nullptr;
  std::shared_ptr<std::vector<Peer>> peers_;
  Heap::Retirement retirement_;  // of the region, when no peer reads it
  std::vector<std::vector<Descriptor>> wakeups_;
};

}  // namespace

std::unique_ptr<Transport> connect_shared_memory(Store& store, const std::string& name, int rank, int world,
                                                 const Deadline& deadline, Rings rings) {
  auto transport = std::make_unique<SharedMemory>(rank, world, rings);
  transport->connect(store, name, deadline);
  return transport;
}

}  // namespace ringlet
