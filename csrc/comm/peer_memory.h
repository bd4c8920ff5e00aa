// A region of GPU memory for each rank of a group, which all ranks' GPUs reach, and the ranks' registered heaps: by raw
// addresses where ranks share a process, by CUDA IPC where they do not.
//
// Contract: the constructor takes this rank's region, zeroed at its start; open() makes the others' reachable from the
// cards that they told. Both throw DeviceError. Regions are not given back to the driver while another process may hold
// them open, which CUDA leaves undefined: a retired one serves this process's next group, one that is not is lost.
// Ownership: owns the region and what it opened; the device outlives it. Thread safety: one thread at a time; the
// device must be current but in retire() and the destructor.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "reduce/cuda.h"
#include "transport/token.h"

namespace ringlet {

class PeerMemory {
 public:
  static constexpr size_t kBytes = size_t{16} << 20;  // of a region
  static constexpr size_t kZeroed = size_t{16} << 10;

  /// What a rank tells the others; plain data.
  struct Card {
    Token process{};
    RingletCudaIdentity device{};
    RingletCudaShare share{};
    std::byte* address = nullptr;
    RingletCudaShare heap_share{};
    std::byte* heap = nullptr;  ///< null where the rank has none
    size_t heap_bytes = 0;
  };

  explicit PeerMemory(const RingletCudaDevice& device);
  ~PeerMemory();
  PeerMemory(const PeerMemory&) = delete;
  PeerMemory& operator=(const PeerMemory&) = delete;

  const Card& card() const { return card_; }
  void open(const std::vector<Card>& all, int rank);

  /// By rank, as this rank's device reaches them.
  const std::vector<std::byte*>& regions() const { return regions_; }
  /// The same; null for a rank that has none.
  const std::vector<std::byte*>& heaps() const { return heaps_; }

  /// No rank reads this rank's region again.
  void retire() { retired_ = true; }

  /// How many processors each rank may take so that those that share a GPU run beside each other; equal on all ranks.
  static int processors(const std::vector<Card>& all);

 private:
  std::byte* reached(const Card& card, const RingletCudaShare& share, std::byte* address, const std::string& whose);
  void device_call(int code, const char* what) const;

  const RingletCudaDevice& device_;
  Card card_;
  std::vector<std::byte*> regions_, heaps_;
  std::vector<void*> opened_;
  bool retired_ = false;
};

}  // namespace ringlet
