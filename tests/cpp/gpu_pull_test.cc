// The GPU's pull kernel compiled for the host, with a host thread for each block: the same plans, address arithmetic,
// waits and publications. Every algorithm, staged and in place, in and out of place; under ThreadSanitizer a missing
// wait is a data race.
#include "engine/gpu_pull.h"

#include <chrono>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <thread>

#include "base/error.h"
#include "check.h"
#include "collective_cases.h"
#include "host_block.h"

using namespace ringlet;
using namespace collective_cases;
using namespace host_block;

namespace {

constexpr int kBlocks = 2;

/// What was launched, by rank: each rank's launches run one after another, all ranks' beside each other.
std::map<int, std::vector<std::function<void()>>> launches;

void execute() {
  std::vector<std::thread> ranks;
  for (auto& rank : launches) {
    ranks.emplace_back([&rank] {
      for (auto& launch : rank.second) launch();
    });
  }
  for (std::thread& rank : ranks) rank.join();
  launches.clear();
}

int pull(const cuda::PullArgs* args, DType dtype, ReduceOp op, void*) {
  launches[args->rank].push_back([args = *args, run = find_pull(dtype, op)] { run_blocks(args, run); });
  return 0;
}

int copy_now(void* dst, const void* src, size_t bytes, void*) {
  if (bytes != 0) std::memcpy(dst, src, bytes);
  return 0;
}

const RingletCudaDevice& host_device() {
  static const RingletCudaDevice table = [] {
    RingletCudaDevice device{};
    device.bytes = sizeof device;
    device.pull = pull;
    device.upload = device.download = copy_now;
    device.create_stream = [](void** stream) { return *stream = nullptr, 0; };
    device.destroy_stream = [](void*) { return 0; };
    device.allocate = [](void** memory, size_t bytes) { return *memory = std::malloc(bytes), 0; };
    device.release = [](void* memory) { return std::free(memory), 0; };
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
  GpuPullEngine::Setup setup(int rank) const {
    return {rank, static_cast<int>(addresses_.size()), addresses_, bytes_, kBlocks};
  }

 private:
  size_t bytes_;
  std::vector<Bytes> storage_;
  std::vector<std::byte*> addresses_;
};

struct Rank {
  Rank(const Case& c, int rank, const Regions& regions) : tensors(c, rank), engine(host_device(), regions.setup(rank)) {
    tensors.write_input();
  }
  Tensors tensors;
  GpuPullEngine engine;
};

void run_case(const Case& c, bool registered, size_t region_bytes, int calls = 1) {
  const Regions regions(c.world, region_bytes);
  std::vector<std::unique_ptr<Rank>> ranks;
  std::vector<Bytes> inputs;
  GpuPullEngine::Registered all;
  for (int q = 0; q < c.world; ++q) {
    ranks.push_back(std::make_unique<Rank>(c, q, regions));
    inputs.push_back(ranks.back()->tensors.given);
    all.inputs.push_back(ranks.back()->tensors.call.input);
    all.outputs.push_back(ranks.back()->tensors.call.output);
  }
  for (int i = 0; i < calls; ++i) {
    for (auto& rank : ranks) {
      rank->engine.run(rank->tensors.call, nullptr, registered ? &all : nullptr);
      // The input is the caller's again at once.
      launches[rank->tensors.rank].push_back([&tensors = rank->tensors] {
        tensors.read_output();
        tensors.write_input();
      });
    }
  }
  execute();
  bool ok = true;
  for (int q = 0; q < c.world; ++q) {
    Rank& rank = *ranks[static_cast<size_t>(q)];
    rank.engine.check();
    ok = ok && rank.tensors.good(expected(c, q, inputs));
  }
  check_report(ok, __FILE__, __LINE__, describe_case(c) + (registered ? " registered" : " staged"));
}

void every_algorithm() {
  for (const Algorithm& algorithm : algorithms()) {
    for (const int world : {1, 2, 3, 4, 5}) {
      for (const size_t count : {0, 1, world - 1, world + 1, 2347}) {
        for (const bool in_place : {false, true}) {
          for (const bool registered : {false, true}) {
            Case c{&algorithm, world, algorithm.collective == Collective::barrier ? 0 : count};
            c.in_place = in_place;
            c.seed = static_cast<unsigned>(count) % 11;
            c.offset = 4 * (count % 3);
            // Pieces of at most some hundred elements, so several for each block.
            if (has_place(c)) run_case(c, registered, size_t{24} << 10, /*calls=*/2);
          }
        }
      }
    }
  }
}

void every_dtype_and_operation() {
  for (const char* name : {"ring", "two_shot"}) {
    for (int d = 0; d < kDTypes; ++d) {
      for (int o = 0; o < kReduceOps; ++o) {
        Case c{find_algorithm(Collective::all_reduce, name), 3, 1237, static_cast<DType>(d), static_cast<ReduceOp>(o)};
        if (!supports(c.dtype, c.op)) continue;
        c.in_place = (d + o) % 2 == 0;
        c.offset = element_size(c.dtype);
        run_case(c, /*registered=*/false, size_t{24} << 10);
        if (c.op != ReduceOp::premul_sum) run_case(c, /*registered=*/true, size_t{24} << 10);
      }
    }
  }
}

/// A rank that does not come: the others' blocks end within their time, say who was missing, and later ones end at once.
void a_missing_rank() {
  Case c{find_algorithm(Collective::all_reduce, "ring"), 3, 1000};
  const Regions regions(3, size_t{24} << 10);
  Rank zero(c, 0, regions), one(c, 1, regions);
  for (Rank* rank : {&zero, &one}) {
    rank->tensors.call.timeout = std::chrono::milliseconds(20);
    rank->engine.run(rank->tensors.call, nullptr);
  }
  execute();
  const std::string message = CHECK_THROWS(Timeout, zero.engine.check());
  CHECK(message.find("rank 0 of 3") != std::string::npos && message.find("for rank 2") != std::string::npos);
  CHECK(message.find("all_reduce #0 (ring, sum, int32, 1000 elements)") != std::string::npos);
  CHECK_THROWS(Timeout, one.engine.check());
  zero.tensors.call.timeout = std::chrono::hours(24);
  zero.engine.run(zero.tensors.call, nullptr);
  execute();
  CHECK_THROWS(Timeout, zero.engine.check());
}

void refusals() {
  Case c{find_algorithm(Collective::all_reduce, "ring"), 3, 1000};
  const Regions regions(3, 1024);
  Rank rank(c, 0, regions);
  const std::string message = CHECK_THROWS(InvalidUsage, rank.engine.run(rank.tensors.call, nullptr));
  CHECK(message.find("regions of at least") != std::string::npos);
  const GpuPullEngine::Registered few{{nullptr}, {nullptr}};
  CHECK_THROWS(InvalidUsage, rank.engine.run(rank.tensors.call, nullptr, &few));
  GpuPullEngine::Setup crowded = regions.setup(0);
  crowded.world = cuda::kMostRanks + 1;
  CHECK_THROWS(InvalidUsage, GpuPullEngine(host_device(), crowded));
  GpuPullEngine::Setup narrow = regions.setup(0);
  narrow.blocks = 100;
  CHECK_THROWS(InvalidUsage, GpuPullEngine(host_device(), narrow));
  CHECK(launches.empty());
}

}  // namespace

int main() {
  refusals();
  a_missing_rank();
  every_algorithm();
  every_dtype_and_operation();
  return check_result("gpu_pull");
}
