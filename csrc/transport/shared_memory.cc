#include "transport/shared_memory.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "base/error.h"
#include "memory/heap.h"
#include "transport/address.h"
#include "transport/handshake.h"

namespace ringlet {

namespace {

constexpr uint32_t kRegionVersion = 3;

/// What a rank tells the others through the store.
struct Card {
  uint32_t version;
  uint64_t host;
  uint64_t heap_id;
  uint64_t heap_bytes;
  uint64_t region;
  uint64_t presence;  // where the counter is by which this rank departs
  uint64_t present;   // what it counts until then
  Token token;
  char socket_name[64];
};

/// Peers' heaps are mapped once per process, however many groups share them.
std::shared_ptr<const Mapping> map_heap(uint64_t id, const Descriptor& descriptor, size_t bytes) {
  static std::mutex mutex;
  static std::map<uint64_t, std::weak_ptr<const Mapping>> known;
  const std::lock_guard lock(mutex);
  std::shared_ptr<const Mapping> mapping = known[id].lock();
  if (!mapping) {
    std::erase_if(known, [](const auto& each) { return each.second.expired(); });
    mapping = std::make_shared<const Mapping>(descriptor.get(), bytes, Mapping::Access::read_only);
    known[id] = mapping;
  }
  return mapping;
}

bool is_readable(const Descriptor& descriptor) noexcept {
  pollfd wait{descriptor.get(), POLLIN, 0};
  return ::poll(&wait, 1, 0) != 0;
}

/// Another rank of the group, as this one sees it.
struct Peer {
  Descriptor watch{};  // readable once its process is gone; none: this rank's region was never shown to it
  std::shared_ptr<const Mapping> heap{};
  const std::atomic<uint64_t>* presence = nullptr;
  uint64_t present = 0;

  /// Whether it reads this rank's region no more.
  bool departed() const noexcept {
    return !watch.valid() || (presence != nullptr && presence->load(std::memory_order_acquire) != present) ||
           is_readable(watch);
  }
};

/// A region is given back once no peer reads it any more (docs/decisions/0042). What tells so must outlive the region, which
/// another group's may follow at the same place: a counter that this rank moves on when it departs.
class SharedMemory final : public Transport {
 public:
  SharedMemory(int rank, int world) : Transport(rank, world), heap_(Heap::process()), peers_(world), bells_(world) {}
  ~SharedMemory() override { depart(); }

  void connect(Store& store, const std::string& name, bool with_bells, const Deadline& deadline) {
    make_region();
    for (int lane = 0; with_bells && lane < kLanes; ++lane) {
      Descriptor bell(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
      if (!bell.valid()) throw_errno("eventfd");
      bells_[rank_].push_back(std::move(bell));
    }
    Handshake handshake(rank_, world_);
    const Card mine = card(handshake);
    const std::string place = name + "/card", own_key = place + "/" + std::to_string(rank_);
    store.set(own_key, std::string(reinterpret_cast<const char*>(&mine), sizeof mine));
    const std::vector<std::string> told = from_all_ranks(store, place, rank_, world_, deadline);
    std::vector<Card> cards(world_);
    for (int q = 0; q < world_; ++q) cards[q] = q == rank_ ? mine : read_card(told[q], q, mine.host);
    meet(handshake, cards, deadline);
    store.forget(own_key);  // whoever met this rank has read all cards
    find_oversubscription();
  }

  const char* name() const noexcept override { return "shared_memory"; }
  std::optional<uint64_t> locate(const void* pointer, size_t bytes) const noexcept override {
    return heap_->locate(pointer, bytes);
  }
  bool alive(int peer) const noexcept override { return peer == rank_ || !is_readable(peers_[peer].watch); }
  int watch(int peer) const noexcept override { return peers_[peer].watch.get(); }
  int bell(int peer, Lane lane) const noexcept override {
    return bells_[peer].empty() ? -1 : bells_[peer][static_cast<size_t>(lane)].get();
  }
  void retire() noexcept override { heap_->discard(region_ + layout_.stages(), layout_.bytes() - layout_.stages()); }

  void depart() noexcept override {
    if (region_ == nullptr) return;
    Transport::depart();
    if (presence_ != nullptr) heap_->drop_counter(*presence_);
    auto readers = std::make_shared<std::vector<Peer>>(std::move(peers_));
    heap_->free_when(std::exchange(region_, nullptr), [readers] {
      std::erase_if(*readers, [](const Peer& peer) { return peer.departed(); });
      return readers->empty();
    });
  }

 private:
  Card read_card(const std::string& text, int rank, uint64_t host) const {
    Card card;
    if (text.size() != sizeof card) {
      throw InvalidUsage("rank " + std::to_string(rank) +
                         " published something else than ringlet's card: another version?");
    }
    std::memcpy(&card, text.data(), sizeof card);
    if (card.version != kRegionVersion) {
      throw InvalidUsage("rank " + std::to_string(rank) + " runs another version of ringlet (region " +
                         std::to_string(card.version) + ", here " + std::to_string(kRegionVersion) + ")");
    }
    if (card.host != host) {
      throw InvalidUsage(
          "rank " + std::to_string(rank) + " and rank " + std::to_string(rank_) +
          " are not on one host (or not in one network namespace); shared_memory joins the ranks of one host");
    }
    return card;
  }

  void make_region() {
    region_ = heap_->allocate(layout_.bytes());
    presence_ = &heap_->take_counter();
    // A used block of the heap holds old bytes; counters must start at zero before any peer looks.
    std::memset(region_, 0, layout_.stages());
    links_[rank_] = {region_, heap_->base()};
  }

  Card card(const Handshake& handshake) const {
    Card mine{};
    mine.version = kRegionVersion;
    mine.host = host_identity();
    mine.heap_id = heap_->id();
    mine.heap_bytes = heap_->bytes();
    mine.region = *heap_->locate(region_, 1);
    mine.presence = *heap_->locate(presence_, sizeof *presence_);
    mine.present = presence_->load(std::memory_order_relaxed);
    mine.token = handshake.token();
    std::strncpy(mine.socket_name, handshake.name().c_str(), sizeof mine.socket_name - 1);
    return mine;
  }

  void meet(Handshake& handshake, const std::vector<Card>& cards, const Deadline& deadline) {
    std::vector<Handshake::Peer> addresses;
    for (const Card& each : cards) addresses.push_back({each.socket_name, each.token});
    const Descriptor own = heap_->read_only_descriptor();
    std::vector<int> handed{own.get()};
    for (const Descriptor& bell : bells_[rank_]) handed.push_back(bell.get());
    std::vector<Introduced> met(world_);
    try {
      handshake.meet(addresses, handed, met, deadline);
    } catch (...) {
      adopt(met, cards);
      throw;
    }
    adopt(met, cards);
  }

  /// From here on those who were met count as readers of this rank's region.
  void adopt(std::vector<Introduced>& met, const std::vector<Card>& cards) {
    for (int q = 0; q < world_; ++q) peers_[q].watch = std::move(met[q].watch);
    for (int q = 0; q < world_; ++q) {
      if (!met[q].heap.valid()) continue;
      const std::shared_ptr<const Mapping> heap = map_heap(cards[q].heap_id, met[q].heap, cards[q].heap_bytes);
      peers_[q].presence = reinterpret_cast<const std::atomic<uint64_t>*>(heap->base() + cards[q].presence);
      peers_[q].present = cards[q].present;
      bells_[q] = std::move(met[q].bells);
      links_[q] = {heap->base() + cards[q].region, heap->base()};
      peers_[q].heap = heap;
    }
  }

  std::shared_ptr<Heap> heap_;
  std::byte* region_ = nullptr;
  std::atomic<uint64_t>* presence_ = nullptr;
  std::vector<Peer> peers_;
  std::vector<std::vector<Descriptor>> bells_;
};

}  // namespace

std::unique_ptr<Transport> connect_shared_memory(Store& store, const std::string& name, int rank, int world,
                                                 const Deadline& deadline) {
  auto transport = std::make_unique<SharedMemory>(rank, world);
  transport->connect(store, name, false, deadline);
  return transport;
}

std::unique_ptr<Transport> connect_with_bells(Store& store, const std::string& name, int rank, int world,
                                              const Deadline& deadline) {
  auto transport = std::make_unique<SharedMemory>(rank, world);
  transport->connect(store, name, true, deadline);
  return transport;
}

}  // namespace ringlet
