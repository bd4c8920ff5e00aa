#include "gpu/peer_memory.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <mutex>
#include <string>

#include "base/deadline.h"
#include "base/error.h"
#include "base/system_call.h"
#include "gpu/check_device.h"
#include "gpu/gpu_heap.h"

namespace ringlet {
namespace {

const Token& token_of_process() {
  static const Token token = random_token();
  return token;
}

static_assert(cuda::kMostRanks * sizeof(uint64_t) <= PeerMemory::kGoodbyes);

/// A rank's word in a region: not 0 once it has left.
std::byte* goodbye(std::byte* region, int rank) { return region + static_cast<size_t>(rank) * sizeof(uint64_t); }

/// Regions of groups that have ended on this rank. Some of their ranks may not have left them yet, or never will.
class Left {
 public:
  static Left& all() {
    static auto* const one = new Left;  // groups may end after all statics
    return *one;
  }
  /// One that is nobody's any more, or null.
  std::byte* take(int device, const CopyStream& copies) {
    const std::lock_guard lock(mutex_);
    const auto is_free = [&](const Region& region) {
      if (region.device != device) return false;
      for (int q = 0; q < region.world; ++q) {
        uint64_t said = 0;
        if (copies.download(&said, goodbye(region.memory, q), sizeof said) != 0 || said == 0) return false;
      }
      return true;
    };
    const auto found = std::find_if(regions_.begin(), regions_.end(), is_free);
    if (found == regions_.end()) return nullptr;
    std::byte* memory = found->memory;
    regions_.erase(found);
    return memory;
  }
  void put(int device, std::byte* memory, int world) {
    const std::lock_guard lock(mutex_);
    regions_.push_back({device, memory, world});
  }

 private:
  struct Region {
    int device;
    std::byte* memory;
    int world;  // so many have to leave it
  };
  std::mutex mutex_;
  std::vector<Region> regions_;
};

}  // namespace

bool PeerMemory::Offer::shares_device(const Offer& other) const {
  return std::memcmp(device.uuid, other.device.uuid, sizeof device.uuid) == 0;
}

PeerMemory::Offer PeerMemory::nothing(const RingletCudaDevice& device) {
  Offer offer;
  offer.process = token_of_process();
  check_device(device, device.identity(&offer.device), "asking for the device's identity");
  return offer;
}

PeerMemory::PeerMemory(const RingletCudaDevice& device) : device_(device), copies_(device), offer_(nothing(device)) {
  if (const GpuHeap* heap = GpuHeap::of(device_, offer_.device.number)) {
    offer_.heap_share = heap->share();
    offer_.heap = heap->base();
    offer_.heap_bytes = heap->bytes();
  }
  std::byte* region = Left::all().take(offer_.device.number, copies_);
  if (region == nullptr) {
    void* fresh = nullptr;
    check_device(device_, device_.allocate(&fresh, kWhole), "allocating memory for peers");
    region = static_cast<std::byte*>(fresh);
  }
  offer_.address = region;
  try {
    check_device(device_, device_.share(region, &offer_.share), "sharing memory with other processes");
    static constexpr std::array<std::byte, kGoodbyes + kZeroed> zeros{};
    check_device(device_, copies_.upload(region, zeros.data(), sizeof zeros), "zeroing memory for peers");
  } catch (...) {
    Left::all().put(offer_.device.number, region, 0);
    throw;
  }
}

PeerMemory::~PeerMemory() {
  for (void* memory : opened_) device_.close(memory, offer_.device.number);
  Left::all().put(offer_.device.number, offer_.address, static_cast<int>(regions_.size()));
}

void PeerMemory::open(const std::vector<Offer>& all, int rank) {
  rank_ = rank;
  for (size_t q = 0; q < all.size(); ++q) {
    const Offer& offer = static_cast<int>(q) == rank ? offer_ : all[q];
    const std::string whose = "reaching the memory of rank " + std::to_string(q);
    if (!offer.shares_process(offer_)) {
      elsewhere_.push_back(static_cast<int>(q));
    } else if (static_cast<int>(q) != rank) {
      check_device(device_, device_.reach(offer.device.number), whose);
      shares_device_ = shares_device_ || offer.device.number == offer_.device.number;
    }
    regions_.push_back(reached(offer, offer.share, offer.address, whose));
    heaps_.push_back(offer.heap == nullptr ? nullptr : reached(offer, offer.heap_share, offer.heap, whose));
  }
}

void PeerMemory::leave(std::chrono::milliseconds patience) noexcept {
  const uint64_t left = 1;
  // Where this does not get there the region is not used again, and nothing else is amiss.
  for (std::byte* region : regions_) copies_.upload(goodbye(region, rank_), &left, sizeof left);
  const Deadline deadline = Deadline::after(patience);
  for (const int q : elsewhere_) {
    for (uint64_t said = 0; said == 0 && !deadline.passed();) {
      if (copies_.download(&said, goodbye(offer_.address, q), sizeof said) != 0) return;
      if (said == 0) sleep_for(std::chrono::milliseconds(1));
    }
  }
}

void PeerMemory::give_up() noexcept { regions_.clear(); }

std::vector<std::byte*> PeerMemory::regions() const {
  std::vector<std::byte*> behind_goodbyes = regions_;
  for (std::byte*& region : behind_goodbyes) region += kGoodbyes;
  return behind_goodbyes;
}

std::byte* PeerMemory::reached(const Offer& offer, const RingletCudaShare& share, std::byte* address,
                               const std::string& whose) {
  if (offer.shares_process(offer_)) return address;
  void* memory = nullptr;
  check_device(device_, device_.open(&share, &memory), whose);
  opened_.push_back(memory);
  return static_cast<std::byte*>(memory);
}

int PeerMemory::processors(const std::vector<Offer>& all) {
  int least = all.at(0).device.processors;
  for (const Offer& one : all) {
    const auto sharing =
        std::count_if(all.begin(), all.end(), [&](const Offer& other) { return one.shares_device(other); });
    least = std::min(least, one.device.processors / static_cast<int>(sharing));
  }
  return std::max(1, least);
}

}  // namespace ringlet
