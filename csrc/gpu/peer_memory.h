// A region of GPU memory for each rank of a group, which all ranks' GPUs reach, and the ranks' registered heaps: by raw
// addresses where ranks share a process, by CUDA IPC where they do not.
//
// Contract: the constructor takes this rank's region, zeroed at its start; open() makes the others' reachable from the
// offers that they told. Both throw DeviceError. Regions are not given back to the driver while another process may
// hold them open, which CUDA leaves undefined: one that its rank has left, and all its peers, serves this process's
// next group; one that some of them never leave is lost.
// Ownership: owns the region and what it opened; the device outlives it. Thread safety: one thread at a time; the
// device must be current but in leave() and the destructor.
#pragma once

#include <chrono>
#include <cstddef>
#include <string>
#include <vector>

#include "cuda/device_library.h"
#include "cuda/pull.h"
#include "gpu/copy_stream.h"
#include "transport/token.h"

namespace ringlet {

class PeerMemory {
 public:
  static constexpr size_t kWhole = size_t{16} << 20;  // of a region; it begins with a word for each rank
  static constexpr size_t kGoodbyes = cuda::PullLayout::kLine * 2;
  static constexpr size_t kBytes = kWhole - kGoodbyes;
  static constexpr size_t kZeroed = size_t{128} << 10;  // of these

  /// What a rank tells the others; plain data.
  struct Offer {
    Token process{};
    RingletCudaIdentity device{};
    RingletCudaShare share{};
    std::byte* address = nullptr;
    RingletCudaShare heap_share{};
    std::byte* heap = nullptr;  ///< null where the rank has none
    size_t heap_bytes = 0;

    bool shares_process(const Offer& other) const { return process == other.process; }
    bool shares_device(const Offer& other) const;
  };
  /// What a rank tells that offers nothing: its process and its device.
  static Offer nothing(const RingletCudaDevice& device);

  explicit PeerMemory(const RingletCudaDevice& device);
  ~PeerMemory();
  PeerMemory(const PeerMemory&) = delete;
  PeerMemory& operator=(const PeerMemory&) = delete;

  const Offer& offer() const { return offer_; }
  void open(const std::vector<Offer>& all, int rank);

  /// By rank, as this rank's device reaches them; each has kBytes.
  std::vector<std::byte*> regions() const;
  /// The same; null for a rank that has none.
  const std::vector<std::byte*>& heaps() const { return heaps_; }

  /// Whether another rank of this process has the same device.
  bool shares_device() const { return shares_device_; }

  /// This rank has ended well: no kernel of its reads or writes any region again. Tells the others, and waits
  /// until those of other processes have told the same, at most that long: memory of a process that ends goes with it.
  void leave(std::chrono::milliseconds patience) noexcept;
  /// No rank has read or written any region, and none will.
  void give_up() noexcept;

  /// How many processors each rank may take so that those that share a GPU run beside each other; equal on all ranks.
  static int processors(const std::vector<Offer>& all);

 private:
  std::byte* reached(const Offer& offer, const RingletCudaShare& share, std::byte* address, const std::string& whose);

  const RingletCudaDevice& device_;
  const CopyStream copies_;
  Offer offer_;
  int rank_ = 0;
  bool shares_device_ = false;
  std::vector<int> elsewhere_;  // ranks of other processes
  std::vector<std::byte*> regions_, heaps_;
  std::vector<void*> opened_;
};

}  // namespace ringlet
