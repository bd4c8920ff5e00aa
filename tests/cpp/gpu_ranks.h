// Groups on the GPU and the NCCL of the host that run (emulated_gpu.cc); ranks are threads.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "check.h"
#include "gpu/gpu_group.h"
#include "ranks.h"

namespace gpu_ranks {

using namespace ringlet;

inline const RingletCudaDevice& device() { return *ringlet_cuda_device(); }

/// Up to so many bytes go through peers' memory.
inline GpuExecutors::Parts parts(size_t peer_bytes = GpuExecutors::kPeerBytes) {
  static const NcclApi api = open_nccl({{EMULATED_GPU}});
  return {.device = &device(), .nccl = &api, .peer_bytes = peer_bytes};
}

inline GpuExecutors::Parts without_nccl() { return {.device = &device(), .no_nccl = "no NCCL: gone fishing"}; }

inline constexpr size_t kAlways = SIZE_MAX, kNever = 0;

struct StreamOwner {
  StreamOwner() { device().create_stream(&stream); }
  ~StreamOwner() { device().destroy_stream(stream); }
  StreamOwner(const StreamOwner&) = delete;
  void* stream = nullptr;
};

inline constexpr auto kLong = std::chrono::seconds(60), kSoon = std::chrono::seconds(20);

/// A rank's own, and the call that adds up all ranks'.
struct RankFloats : Floats {
  explicit RankFloats(int rank, size_t count = 1000) : Floats(count, static_cast<float>(rank + 1)) {}
  Call call = sum();
};

}  // namespace gpu_ranks
