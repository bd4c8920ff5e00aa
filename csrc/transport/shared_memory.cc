#include "transport/shared_memory.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cstring>
#include <map>
#include <mutex>
#include <vector>

#include "base/error.h"
#include "memory/heap.h"
#include "transport/address.h"
#include "transport/handshake.h"

namespace ringlet {

namespace {

constexpr uint32_t kRegionVersion = 2;

/// What a rank tells the others through the store.
struct Card {
  uint32_t version;
  uint64_t host;
  uint64_t heap_id;
  uint64_t heap_bytes;
  uint64_t region;
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
    mapping = std::make_shared<const Mapping>(descriptor.get(), bytes, Mapping::Access::read_only);
    known[id] = mapping;
  }
  return mapping;
}

class SharedMemory final : public Transport {
 public:
  SharedMemory(int rank, int world, bool with_bells)
      : Transport(rank, world), heap_(Heap::process()), watches_(world), bells_(world), maps_(world) {
    region_ = heap_->allocate(layout_.bytes());
    // A used block of the heap holds old bytes; counters must start at zero before any peer looks.
    std::memset(region_, 0, layout_.stages());
    for (int lane = 0; with_bells && lane < kLanes; ++lane) {
      Descriptor bell(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
      if (!bell.valid()) throw_errno("eventfd");
      bells_[rank].push_back(std::move(bell));
    }
  }

  void connect(Store& store, const std::string& name, const Deadline& deadline) {
    Handshake handshake(rank_, world_);
    Card mine{kRegionVersion,
              host_identity(),
              heap_->id(),
              heap_->bytes(),
              *heap_->locate(region_, 1),
              handshake.token(),
              {}};
    std::strncpy(mine.socket_name, handshake.name().c_str(), sizeof mine.socket_name - 1);
    const std::string place = name + "/card", own_key = place + "/" + std::to_string(rank_);
    store.set(own_key, std::string(reinterpret_cast<const char*>(&mine), sizeof mine));
    const std::vector<std::string> told = from_all_ranks(store, place, rank_, world_, deadline);
    std::vector<Card> cards(world_);
    std::vector<Handshake::Peer> peers(world_);
    for (int q = 0; q < world_; ++q) {
      cards[q] = q == rank_ ? mine : read_card(told[q], q, mine.host);
      peers[q] = {cards[q].socket_name, cards[q].token};
    }
    const Descriptor own = heap_->read_only_descriptor();
    std::vector<int> handed{own.get()};
    for (const Descriptor& bell : bells_[rank_]) handed.push_back(bell.get());
    std::vector<Introduced> met = handshake.meet(peers, handed, deadline);
    store.forget(own_key);  // whoever met this rank has read all cards
    for (int q = 0; q < world_; ++q) {
      if (q == rank_) {
        links_[q] = {region_, heap_->base()};
        continue;
      }
      maps_[q] = map_heap(cards[q].heap_id, met[q].heap, cards[q].heap_bytes);
      watches_[q] = std::move(met[q].watch);
      bells_[q] = std::move(met[q].bells);
      links_[q] = {maps_[q]->base() + cards[q].region, maps_[q]->base()};
    }
    find_oversubscription();
  }

  const char* name() const noexcept override { return "shared_memory"; }
  std::optional<uint64_t> locate(const void* pointer, size_t bytes) const noexcept override {
    return heap_->locate(pointer, bytes);
  }
  bool alive(int peer) const noexcept override {
    pollfd wait{watches_[peer].get(), POLLIN, 0};
    return peer == rank_ || ::poll(&wait, 1, 0) == 0;
  }
  int watch(int peer) const noexcept override { return watches_[peer].get(); }
  int bell(int peer, Lane lane) const noexcept override {
    return bells_[peer].empty() ? -1 : bells_[peer][static_cast<size_t>(lane)].get();
  }
  void retire() noexcept override { heap_->discard(region_ + layout_.stages(), layout_.bytes() - layout_.stages()); }

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

  std::shared_ptr<Heap> heap_;
  std::byte* region_;
  std::vector<Descriptor> watches_;
  std::vector<std::vector<Descriptor>> bells_;
  std::vector<std::shared_ptr<const Mapping>> maps_;
};

}  // namespace

std::unique_ptr<Transport> connect_shared_memory(Store& store, const std::string& name, int rank, int world,
                                                 const Deadline& deadline) {
  auto transport = std::make_unique<SharedMemory>(rank, world, false);
  transport->connect(store, name, deadline);
  return transport;
}

std::unique_ptr<Transport> connect_with_bells(Store& store, const std::string& name, int rank, int world,
                                              const Deadline& deadline) {
  auto transport = std::make_unique<SharedMemory>(rank, world, true);
  transport->connect(store, name, deadline);
  return transport;
}

}  // namespace ringlet
