// Ranks of one process whose GPU kernels run on the host (host_block.h, team_block.h): launches are gathered, then all
// ranks' are executed beside each other.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "collective_cases.h"
#include "gpu/gpu_pull_executor.h"
#include "host_block.h"
#include "team_block.h"

namespace pull_ranks {

using namespace ringlet;
using namespace collective_cases;
using namespace host_block;

inline constexpr int kBlocks = 2;

/// What was launched, by rank: each rank's launches run one after another, all ranks' beside each other.
inline std::map<int, std::vector<std::function<void()>>> launches;

inline void execute() {
  std::vector<std::thread> ranks;
  for (auto& rank : launches) {
    ranks.emplace_back([&rank] {
      for (auto& launch : rank.second) launch();
    });
  }
  for (std::thread& rank : ranks) rank.join();
  launches.clear();
}

inline cuda::PullArgs last_args;  // of what was launched

/// Whether blocks are teams of threads; then of int32's sums only, and of what only copies.
inline bool in_teams = false;

inline int pull(const cuda::PullArgs* args, DType dtype, void*) {
  last_args = *args;
  if (in_teams) {
    const auto run = dtype == DType::int32 ? team_block::pull<cuda::Integer<int32_t>, cuda::Arithmetic>
                                           : team_block::pull<cuda::Integer<uint8_t>, cuda::Bitwise>;
    launches[args->rank].push_back([args = *args, run] { run(args); });
    return 0;
  }
  launches[args->rank].push_back([args = *args, run = find_pull(dtype, args->op)] { run_blocks(args, run); });
  return 0;
}

inline int exchange(const cuda::ExchangeArgs* args, void*) {
  const auto run =
      in_teams ? team_block::exchange : [](const cuda::ExchangeArgs& args) { run_blocks(args, run_exchange); };
  launches[args->rank].push_back([args = *args, run] { run(args); });
  return 0;
}

inline int low_launches = 0;
inline int low_latency(const cuda::LowArgs* args, DType dtype, ReduceOp, void*) {
  ++low_launches;
  if (in_teams) {
    launches[args->rank].push_back([args = *args] { team_block::low_latency(args); });
  } else {
    launches[args->rank].push_back([args = *args, run = find_low_latency(dtype)] { run_blocks(args, run); });
  }
  return 0;
}

inline int copy_now(void* dst, const void* src, size_t bytes, void*) {
  if (bytes != 0) std::memcpy(dst, src, bytes);
  return 0;
}

inline const RingletCudaDevice& host_device() {
  static const RingletCudaDevice table = [] {
    RingletCudaDevice device{};
    device.bytes = sizeof device;
    device.pull = pull;
    device.exchange = exchange;
    device.low_latency = low_latency;
    device.upload = device.download = copy_now;
    device.create_stream = [](void** stream) { return *stream = nullptr, 0; };
    device.destroy_stream = [](void*) { return 0; };
    device.allocate = [](void** memory, size_t bytes) { return *memory = std::malloc(bytes), 0; };
    device.release = [](void* memory) { return std::free(memory), 0; };
    device.allocate_mapped = [](void** memory, size_t bytes) { return *memory = std::calloc(1, bytes), 0; };
    device.release_mapped = device.release;
    device.explain = [](int) { return "said by the host"; };
    return device;
  }();
  return table;
}

/// A group's regions, in one process: any address is good everywhere.
class Regions {
 public:
  Regions(int world, size_t bytes) : bytes_(bytes) {
    for (int q = 0; q < world; ++q) {
      storage_.emplace_back(bytes + 128);
      const auto start = reinterpret_cast<uintptr_t>(storage_.back().data());
      addresses_.push_back(storage_.back().data() + (-start % 128));
    }
  }
  /// Whether a rank has put anything into its staging buffers.
  bool staged(int rank) const {
    const std::byte* region = addresses_[static_cast<size_t>(rank)];
    const size_t stages = cuda::PullLayout{kBlocks, static_cast<int>(addresses_.size()), 0, 0}.staging();
    return std::any_of(region + stages, region + bytes_, [](std::byte byte) { return byte != std::byte{0}; });
  }

  /// `registered`: everything is in a heap that begins at 0.
  GpuPullExecutor::Setup setup(int rank, bool registered = false) const {
    GpuPullExecutor::Setup setup{rank, static_cast<int>(addresses_.size()), addresses_, bytes_, kBlocks};
    setup.heaps.assign(addresses_.size(), nullptr);
    setup.heap_bytes = registered ? SIZE_MAX : 0;
    return setup;
  }

 private:
  size_t bytes_;
  std::vector<Bytes> storage_;
  std::vector<std::byte*> addresses_;
};

/// The executors of a group. `registered`: which ranks' tensors are in their heaps; none unless said.
struct World {
  explicit World(int size, size_t region_bytes = size_t{24} << 10, const std::vector<bool>& registered = {},
                 const std::function<void(GpuPullExecutor::Setup&)>& change = {})
      : regions(size, region_bytes) {
    for (int q = 0; q < size; ++q) {
      GpuPullExecutor::Setup setup = regions.setup(q, !registered.empty() && registered[static_cast<size_t>(q)]);
      if (change) change(setup);
      engines.push_back(std::make_unique<GpuPullExecutor>(host_device(), setup));
    }
  }
  int size() const { return static_cast<int>(engines.size()); }
  GpuPullExecutor& operator[](int rank) { return *engines[static_cast<size_t>(rank)]; }
  void check() {
    for (const auto& engine : engines) engine->check("a call");
  }

  Regions regions;
  std::vector<std::unique_ptr<GpuPullExecutor>> engines;
};

/// A case's tensors on all ranks.
struct AllTensors {
  explicit AllTensors(const Case& c) : c(c) {
    for (int q = 0; q < c.world; ++q) add(c);
  }
  Tensors& add(const Case& own) {
    ranks.push_back(std::make_unique<Tensors>(own, static_cast<int>(ranks.size())));
    ranks.back()->write_input();
    return *ranks.back();
  }
  Tensors& operator[](int rank) { return *ranks[static_cast<size_t>(rank)]; }

  /// Puts the call on every rank's stream; the inputs are the callers' again at once.
  void enqueue(World& world) {
    for (auto& tensors : ranks) {
      world[tensors->rank].run(tensors->call, nullptr);
      launches[tensors->rank].push_back([&tensors = *tensors] {
        tensors.read_output();
        tensors.spoil_input();
      });
    }
  }
  void check(const std::string& what) const {
    std::vector<Bytes> inputs;
    for (const auto& tensors : ranks) inputs.push_back(tensors->given);
    const Bytes total = total_of(c, inputs);
    bool ok = true;
    for (const auto& tensors : ranks) ok = ok && tensors->good(expected(c, tensors->rank, inputs, total));
    check_report(ok, __FILE__, __LINE__, describe_case(c) + what);
  }

  Case c;
  std::vector<std::unique_ptr<Tensors>> ranks;
};

}  // namespace pull_ranks
