#include "comm/peer_memory.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <mutex>
#include <string>

#include "base/error.h"
#include "comm/gpu_heap.h"

namespace ringlet {
namespace {

const Token& this_process() {
  static const Token token = random_token();
  return token;
}

/// Regions of groups that ended, by the number of their device.
class Retired {
 public:
  static Retired& all() {
    static auto* const one = new Retired;  // groups may end after all statics
    return *one;
  }
  void* take(int device) {
    const std::lock_guard lock(mutex_);
    std::vector<void*>& regions = regions_[device];
    if (regions.empty()) return nullptr;
    void* region = regions.back();
    regions.pop_back();
    return region;
  }
  void put(int device, void* region) {
    const std::lock_guard lock(mutex_);
    regions_[device].push_back(region);
  }

 private:
  std::mutex mutex_;
  std::map<int, std::vector<void*>> regions_;
};

bool same_device(const RingletCudaIdentity& a, const RingletCudaIdentity& b) {
  return std::memcmp(a.uuid, b.uuid, sizeof a.uuid) == 0;
}

}  // namespace

PeerMemory::PeerMemory(const RingletCudaDevice& device) : device_(device) {
  card_.process = this_process();
  device_call(device_.identity(&card_.device), "asking for the device's identity");
  if (const GpuHeap* heap = GpuHeap::of(device_, card_.device.number)) {
    card_.heap_share = heap->share();
    card_.heap = heap->base();
    card_.heap_bytes = heap->bytes();
  }
  void* region = Retired::all().take(card_.device.number);
  if (region == nullptr) device_call(device_.allocate(&region, kBytes), "allocating memory for peers");
  card_.address = static_cast<std::byte*>(region);
  try {
    device_call(device_.share(region, &card_.share), "sharing memory with other processes");
    void* stream = nullptr;
    device_call(device_.create_stream(&stream), "making a stream");
    static constexpr std::array<std::byte, kZeroed> zeros{};
    const int code = device_.upload(region, zeros.data(), kZeroed, stream);
    device_.destroy_stream(stream);
    device_call(code, "zeroing memory for peers");
  } catch (...) {
    Retired::all().put(card_.device.number, region);
    throw;
  }
}

PeerMemory::~PeerMemory() {
  for (void* memory : opened_) device_.close(memory, card_.device.number);
  if (retired_) Retired::all().put(card_.device.number, card_.address);
}

void PeerMemory::open(const std::vector<Card>& all, int rank) {
  for (size_t q = 0; q < all.size(); ++q) {
    const Card& card = static_cast<int>(q) == rank ? card_ : all[q];
    const std::string whose = "reaching the memory of rank " + std::to_string(q);
    if (card.process == card_.process && static_cast<int>(q) != rank) {
      device_call(device_.reach(card.device.number), whose.c_str());
    }
    regions_.push_back(reached(card, card.share, card.address, whose));
    heaps_.push_back(card.heap == nullptr ? nullptr : reached(card, card.heap_share, card.heap, whose));
  }
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
