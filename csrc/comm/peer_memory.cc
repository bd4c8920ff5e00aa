#include "comm/peer_memory.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <mutex>
#include <string>
#include <thread>

#include "base/deadline.h"
#include "base/error.h"
#include "comm/gpu_heap.h"

namespace ringlet {
namespace {

const Token& this_process() {
  static const Token token = random_token();
  return token;
}

static_assert(cuda::kMostRanks * sizeof(uint64_t) <= PeerMemory::kFarewells);

/// A rank's word in a region: not 0 once it has left.
std::byte* farewell(std::byte* region, int rank) { return region + static_cast<size_t>(rank) * sizeof(uint64_t); }

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
        if (copies.download(&said, farewell(region.memory, q), sizeof said) != 0 || said == 0) return false;
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

bool same_device(const RingletCudaIdentity& a, const RingletCudaIdentity& b) {
  return std::memcmp(a.uuid, b.uuid, sizeof a.uuid) == 0;
}

}  // namespace

PeerMemory::PeerMemory(const RingletCudaDevice& device) : device_(device), copies_(device) {
  card_.process = this_process();
  device_call(device_.identity(&card_.device), "asking for the device's identity");
  if (const GpuHeap* heap = GpuHeap::of(device_, card_.device.number)) {
    card_.heap_share = heap->share();
    card_.heap = heap->base();
    card_.heap_bytes = heap->bytes();
  }
  std::byte* region = Left::all().take(card_.device.number, copies_);
  if (region == nullptr) {
    void* fresh = nullptr;
    device_call(device_.allocate(&fresh, kWhole), "allocating memory for peers");
    region = static_cast<std::byte*>(fresh);
  }
  card_.address = region;
  try {
    device_call(device_.share(region, &card_.share), "sharing memory with other processes");
    static constexpr std::array<std::byte, kFarewells + kZeroed> zeros{};
    device_call(copies_.upload(region, zeros.data(), sizeof zeros), "zeroing memory for peers");
  } catch (...) {
    Left::all().put(card_.device.number, region, 0);
    throw;
  }
}

PeerMemory::~PeerMemory() {
  for (void* memory : opened_) device_.close(memory, card_.device.number);
  Left::all().put(card_.device.number, card_.address, static_cast<int>(regions_.size()));
}

void PeerMemory::open(const std::vector<Card>& all, int rank) {
  rank_ = rank;
  for (size_t q = 0; q < all.size(); ++q) {
    const Card& card = static_cast<int>(q) == rank ? card_ : all[q];
    const std::string whose = "reaching the memory of rank " + std::to_string(q);
    if (card.process != card_.process) {
      elsewhere_.push_back(static_cast<int>(q));
    } else if (static_cast<int>(q) != rank) {
      device_call(device_.reach(card.device.number), whose.c_str());
      shares_device_ = shares_device_ || card.device.number == card_.device.number;
    }
    regions_.push_back(reached(card, card.share, card.address, whose));
    heaps_.push_back(card.heap == nullptr ? nullptr : reached(card, card.heap_share, card.heap, whose));
  }
}

void PeerMemory::leave(std::chrono::milliseconds patience) noexcept {
  const uint64_t left = 1;
  // Where this does not get there the region is not used again, and nothing else is amiss.
  for (std::byte* region : regions_) copies_.upload(farewell(region, rank_), &left, sizeof left);
  const Deadline deadline = Deadline::after(patience);
  for (const int q : elsewhere_) {
    for (uint64_t said = 0; said == 0 && !deadline.passed();) {
      if (copies_.download(&said, farewell(card_.address, q), sizeof said) != 0) return;
      if (said == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
}

void PeerMemory::give_up() noexcept { regions_.clear(); }

std::vector<std::byte*> PeerMemory::regions() const {
  std::vector<std::byte*> behind_farewells = regions_;
  for (std::byte*& region : behind_farewells) region += kFarewells;
  return behind_farewells;
}

std::byte* PeerMemory::reached(const Card& card, const RingletCudaShare& share, std::byte* address,
                               const std::string& whose) {
  if (card.process == card_.process) return address;
  void* memory = nullptr;
  device_call(device_.open(&share, &memory), whose.c_str());
  opened_.push_back(memory);
  return static_cast<std::byte*>(memory);
}

int PeerMemory::processors(const std::vector<Card>& all) {
  int least = all.at(0).device.processors;
  for (const Card& one : all) {
    const auto sharing =
        std::count_if(all.begin(), all.end(), [&](const Card& other) { return same_device(one.device, other.device); });
    least = std::min(least, one.device.processors / static_cast<int>(sharing));
  }
  return std::max(1, least);
}

void PeerMemory::device_call(int code, const char* what) const {
  if (code != 0) throw DeviceError(std::string(what) + ": " + device_.explain(code));
}

}  // namespace ringlet
