#include "pull_world.h"

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <utility>

#include "gpu/peer_memory.h"

namespace gpu_check {
namespace {

constexpr size_t kRegionBytes = size_t{4} << 20;
constexpr int kMostBlocks = 16, kGroupsMostBlocks = 32;

/// So many that all ranks' blocks can run at once, with a quarter of the device to spare.
int blocks_for(int world, int most) {
  RingletCudaIdentity identity{};
  ok(device().identity(&identity), "asking for the device");
  return std::clamp(identity.processors * 3 / 4 / world, 1, most);
}

/// Of ranks whose kernels are one launch: what those have given that came so far.
std::vector<cuda::PullArgs> gathered;

int gather(const cuda::PullArgs* args, DType dtype, void* stream) {
  gathered.push_back(*args);
  if (gathered.size() < static_cast<size_t>(args->world)) return 0;
  const std::vector<cuda::PullArgs> all = std::exchange(gathered, {});
  return device().pull_together(all.data(), args->world, dtype, stream);
}

const RingletCudaDevice& pull_device(const Options& options) {
  static const RingletCudaDevice gathering = [] {
    RingletCudaDevice table = device();
    table.pull = gather;
    return table;
  }();
  return options.together ? gathering : device();
}

}  // namespace

PullWorld::PullWorld(int world, const Options& options, bool as_groups)
    : timeout_(std::chrono::seconds(options.few ? 30 : 5)) {
  GpuPullExecutor::Setup setup;
  setup.world = world;
  setup.region_bytes = as_groups ? PeerMemory::kBytes : kRegionBytes;
  setup.blocks = blocks_for(world, as_groups ? kGroupsMostBlocks : kMostBlocks);
  setup.low_latency = as_groups;
  for (int q = 0; q < world; ++q) {
    regions_.push_back(std::make_unique<Memory>(setup.region_bytes));
    regions_.back()->fill(Bytes(setup.region_bytes));
    setup.regions.push_back(regions_.back()->data());
  }
  setup.heaps.assign(regions_.size(), nullptr);
  for (setup.rank = 0; setup.rank < world; ++setup.rank) {
    GpuPullExecutor::Setup registered = setup;
    registered.heap_bytes = SIZE_MAX;  // it begins at 0
    ranks_.push_back(std::make_unique<Rank>(pull_device(options), setup, registered));
  }
}

void PullWorld::launch(bool registered) {
  for (auto& rank : ranks_) engine(*rank, registered).run(rank->call, rank->stream.get());
}

/// Each comes first at times, and some later than the host takes to launch.
void PullWorld::launch_in_disorder(bool registered) {
  std::vector<size_t> order(ranks_.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::shuffle(order.begin(), order.end(), random_);
  for (const size_t q : order) {
    const auto until = std::chrono::steady_clock::now() + std::chrono::microseconds(random_() % 4 == 0 ? 30 : 0);
    while (std::chrono::steady_clock::now() < until) {
    }
    engine(*ranks_[q], registered).run(ranks_[q]->call, ranks_[q]->stream.get());
  }
}

void PullWorld::wait() {
  for (auto& rank : ranks_) rank->stream.wait();
}

void PullWorld::spoil() {
  for (auto& rank : ranks_) rank->tensors.spoil();
}

std::string PullWorld::run(const Case& c, const Expectation& expectation, bool registered) {
  place_all(ranks_, c, expectation, timeout_);
  launch_in_disorder(registered);
  wait();
  std::string all;
  for (auto& rank : ranks_) {
    try {
      engine(*rank, registered).check("a call");
    } catch (const Error& error) {
      all += (all.empty() ? "" : "; ") + std::string(error.what());
    }
  }
  const std::string wrong = difference(expectation);
  return all.empty() ? wrong : all + "; " + wrong;
}

std::string PullWorld::alone(int rank, const Expectation& expectation, std::chrono::milliseconds timeout) {
  place_all(ranks_, expectation.shape(), expectation, timeout);
  Rank& one = *ranks_[static_cast<size_t>(rank)];
  one.staged.run(one.call, one.stream.get());
  one.stream.wait();
  try {
    one.staged.check("a call");
  } catch (const Timeout& error) {
    return error.what();
  }
  return "no Timeout";
}

}  // namespace gpu_check
