// Sums by multicast memory (cuda/multicast.h) on an emulated switch (emulated_multicast.h): groups of ranks as threads on
// the GPU of the host that runs (emulated_gpu.cc), and kernels whose every thread is one of the host's.
#include "gpu/gpu_multicast.h"

#include <atomic>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "check.h"
#include "comm/gpu_group.h"
#include "emulated_gpu.h"
#include "gpu_ranks.h"
#include "pull_ranks.h"

using namespace gpu_ranks;
using namespace collective_cases;

namespace {

constexpr size_t kMemory = size_t{1} << 20;
constexpr DType kTypes[] = {DType::float32, DType::float16, DType::bfloat16};

const Algorithm* named(const char* algorithm) { return find_algorithm(Collective::all_reduce, algorithm); }

/// Each rank on a GPU of its own.
GpuExecutors::Parts on_own_gpu(const Communicator& host, size_t multicast_bytes = kMemory) {
  GpuExecutors::Parts mine = parts(kAlways);
  mine.number = host.rank();
  mine.multicast_bytes = multicast_bytes;
  device().use(mine.number);
  return mine;
}

/// How many kernels on multicast memory all ranks have launched since this was asked last; between calls of the host's.
int launched(Communicator& host) {
  static std::atomic<int> answer{0}, before{0};
  host.run(Call{});
  if (host.rank() == 0) answer = emulated_gpu_multicasts() - before.exchange(emulated_gpu_multicasts());
  host.run(Call{});
  return answer;
}

void run(Communicator& host, GpuGroup& group, const Case& c, void* stream, bool by_name = false) {
  Tensors tensors(c, host.rank());
  tensors.write_input();
  if (!by_name) tensors.call.algorithm = nullptr;
  group.run(tensors.call, stream)->wait(kLong);
  std::vector<Bytes> inputs;
  for (int q = 0; q < c.world; ++q) inputs.push_back(Tensors(c, q).given);
  tensors.read_output();
  check_report(tensors.good(expected(c, host.rank(), inputs)), __FILE__, __LINE__, describe_case(c));
}

/// All dtypes, counts that leave a pack half full and ranks without a share, tensors that begin anywhere; as many pieces
/// as the memory is too small for. Of such an old architecture there are no words with flags for small messages.
void contract(int world) {
  emulated_gpu_architecture(60);
  no_errors(run_ranks(world, Between::one_memory, [&](Communicator& host) {
    GpuGroup group(host, on_own_gpu(host));
    const StreamOwner own;
    CHECK(group.describe().ends_with(" beyond; multicast memory of 1 MiB"));
    launched(host);
    int calls = 0;
    for (const DType dtype : kTypes) {
      for (const size_t count : {1, world + 1, 1237, 60001, 600001}) {
        if (count > 100000 && dtype != DType::float32) continue;
        Case c{named("two_shot"), world, static_cast<size_t>(count), dtype};
        c.in_place = ++calls % 2 == 0;
        c.offset = element_size(dtype) * static_cast<size_t>((calls + host.rank()) % 3);
        run(host, group, c, own.stream);
      }
    }
    CHECK_EQ(launched(host), calls * world);
  }));
  emulated_gpu_architecture(90);
  CHECK_EQ(emulated_gpu_multicast_objects(), 0);
}

/// Other calls go another way, and none disturbs another.
void what_it_serves() {
  constexpr int kWorld = 3;
  no_errors(run_ranks(kWorld, Between::one_memory, [&](Communicator& host) {
    GpuGroup group(host, on_own_gpu(host));
    const StreamOwner own;
    const auto serves = [&](size_t count, DType dtype = DType::float32, ReduceOp op = ReduceOp::sum,
                            const char* algorithm = nullptr) {
      launched(host);
      const Case c{named(algorithm == nullptr ? "ring" : algorithm), kWorld, count, dtype, op};
      run(host, group, c, own.stream, algorithm != nullptr);
      return launched(host) == kWorld;
    };
    for (int turn = 0; turn < 2; ++turn) {
      CHECK(serves(20000));
      CHECK(!serves(20000, DType::float32, ReduceOp::max));
      CHECK(!serves(20000, DType::float32, ReduceOp::sum, "two_shot"));
      CHECK(!serves(20000, DType::int32));
      CHECK(serves(40000, DType::bfloat16));
      CHECK(!serves(1000));  // words with flags
      CHECK(!serves(0));
      run(host, group, {find_algorithm(Collective::broadcast, "star"), kWorld, 999}, own.stream);
      CHECK(serves(20001));
    }
  }));
}

/// What a rank lacks no rank uses, and the group says why.
void without() {
  const auto described = [](const std::function<GpuExecutors::Parts(Communicator&)>& parts_of, const char* why) {
    no_errors(run_ranks(3, Between::one_memory, [&](Communicator& host) {
      GpuGroup group(host, parts_of(host));
      const StreamOwner own;
      check_report(group.describe().find(why) != std::string::npos, __FILE__, __LINE__, group.describe());
      launched(host);
      run(host, group, {named("two_shot"), 3, 20000, DType::float32}, own.stream);
      CHECK_EQ(launched(host), 0);
    }));
    CHECK_EQ(emulated_gpu_multicast_objects(), 0);
  };
  const auto on_own = [](Communicator& host) { return on_own_gpu(host); };
  const char* reasons[] = {"rank 1: the GPU, its driver or this build of ringlet has no multicast memory",
                           nullptr,  // rank 0's to make
                           "rank 1: taking a multicast object: said by", "rank 1: joining a multicast object: said by",
                           "rank 1: mapping multicast memory: said by"};
  for (int step = 0; step <= 4; ++step) {
    if (reasons[step] == nullptr) continue;
    emulated_gpu_refuse_multicast(step);
    described(on_own, (std::string(" beyond; no multicast memory; ") + reasons[step]).c_str());
  }
  emulated_gpu_refuse_multicast(1);
  const auto from_one_up = [](Communicator& host) {
    GpuExecutors::Parts mine = on_own_gpu(host);
    device().use(mine.number = host.rank() + 1);
    return mine;
  };
  described(from_one_up,
            "; no multicast memory; rank 0: making a multicast object: said by the live fake; rank 1: rank 0 "
            "could make no multicast object; rank 2: rank 0 could make");
  emulated_gpu_refuse_multicast(-1);
  const auto on_one = [](Communicator& host) {
    GpuExecutors::Parts mine = on_own_gpu(host);
    device().use(mine.number = 0);
    return mine;
  };
  described(on_one, "; no multicast memory; rank 0: ranks share a GPU");
  const auto no_peers = [](Communicator& host) {
    GpuExecutors::Parts mine = on_own_gpu(host);
    mine.peer_bytes = 0;
    return mine;
  };
  described(no_peers, "; no multicast memory; rank 0: no peer memory");
}

/// Its size comes from the environment, and is the same on all ranks.
void sizes() {
  setenv("RINGLET_GPU_MULTICAST_MIB", "2", 1);
  CHECK_EQ(GpuExecutors::find(0).multicast_bytes, size_t{2} << 20);
  setenv("RINGLET_GPU_MULTICAST_MIB", "much", 1);
  CHECK(GpuExecutors::find(0).no_device.find("RINGLET_GPU_MULTICAST_MIB") != std::string::npos);
  unsetenv("RINGLET_GPU_MULTICAST_MIB");
  CHECK_EQ(GpuExecutors::find(0).multicast_bytes, size_t{0});
  no_errors(run_ranks(2, Between::one_memory, [&](Communicator& host) {
    const size_t bytes = host.rank() == 0 ? kMemory : 0;
    const std::string message = CHECK_THROWS(InvalidUsage, GpuGroup(host, on_own_gpu(host, bytes)));
    CHECK(message.find("RINGLET_GPU_MULTICAST_MIB, in bytes, is 1048576 on rank 0 and 0 on rank 1") !=
          std::string::npos);
  }));
  no_errors(run_ranks(4, Between::twos, [&](Communicator& host) {
    GpuGroup group(host, on_own_gpu(host));
    CHECK(group.describe().find("; no multicast memory; rank 0: the ranks are on several hosts") != std::string::npos);
  }));
}

/// Calls that differ are named on both ranks, also where only the way differs. A rank that does not come is named.
void failures() {
  const auto differ = [](const std::function<void(Call&)>& other, const char* mine, const char* theirs) {
    std::atomic<int> told{0};
    no_errors(run_ranks(2, Between::one_memory, [&](Communicator& host) {
      Floats floats(host.rank(), 30000);
      const StreamOwner own;
      GpuGroup group(host, on_own_gpu(host));
      if (host.rank() == 1) other(floats.call);
      const std::string message = CHECK_THROWS(InvalidUsage, group.run(floats.call, own.stream)->wait(kSoon));
      told += message.find("calls do not match") != std::string::npos && message.find(mine) != std::string::npos &&
              message.find(theirs) != std::string::npos;
    }));
    CHECK_EQ(told.load(), 2);
  };
  differ([](Call& call) { call.count = 20000; }, "(auto, sum, float32, 30000 elements)",
         "(auto, sum, float32, 20000 elements)");
  differ([](Call& call) { call.algorithm = named("two_shot"); }, "(auto, sum, float32, 30000 elements)",
         "(two_shot, sum, float32, 30000 elements)");
  std::atomic<int> told{0};
  no_errors(run_ranks(3, Between::one_memory, [&](Communicator& host) {
    Floats floats(host.rank(), 30000);
    const StreamOwner own;
    GpuGroup group(host, on_own_gpu(host));
    if (host.rank() == 2) {
      const Deadline deadline = Deadline::after(kSoon);
      CHECK_THROWS(Timeout, while (!deadline.passed()) host.poll_failures(););
      return;
    }
    floats.call.timeout = std::chrono::milliseconds(200);
    CHECK_THROWS(Timeout, group.run(floats.call, own.stream)->wait(kSoon));
    CHECK_THROWS(Timeout, group.run(floats.call, own.stream));
    ++told;
  }));
  CHECK_EQ(told.load(), 2);
  // Nobody knows when the kernels of such groups end, so their memory stays.
  CHECK_EQ(emulated_gpu_multicast_objects(), 3);
}

/// With a thread of the host for each of a block's: several calls one after another, and others between.
void in_teams() {
  constexpr int kWorld = 3;
  constexpr size_t kSmall = 16 << 10;
  pull_ranks::in_teams = true;
  pull_ranks::Regions regions(kWorld, size_t{5} << 20);
  std::vector<std::unique_ptr<GpuPullExecutor>> engines;
  std::vector<RingletCudaMulticast> memories(kWorld, {kWorld, kSmall, 1, 0, nullptr, nullptr});
  int descriptor = -1;
  CHECK_EQ(emulated_multicast::make(&memories[0], &descriptor), 0);
  for (int q = 1; q < kWorld; ++q) CHECK_EQ(emulated_multicast::take(&memories[static_cast<size_t>(q)], descriptor), 0);
  ::close(descriptor);
  for (int q = 0; q < kWorld; ++q) CHECK_EQ(emulated_multicast::join(&memories[static_cast<size_t>(q)], q), 0);
  std::vector<std::unique_ptr<Tensors>> all;
  std::vector<Case> cases;
  for (const size_t count : {6000, 1, 700, 6000}) {
    cases.push_back({named("two_shot"), kWorld, count, DType::float32});
    cases.push_back({named("ring"), kWorld, count / 9 + 1, DType::int32});
  }
  for (size_t q = 0; q < kWorld; ++q) {
    CHECK_EQ(emulated_multicast::map(&memories[q]), 0);
    const GpuMulticast::Memory memory{static_cast<std::byte*>(memories[q].all),
                                      static_cast<std::byte*>(memories[q].own), kSmall};
    const int rank = static_cast<int>(q);
    engines.push_back(std::make_unique<GpuPullExecutor>(pull_ranks::host_device(), regions.setup(rank)));
    GpuMulticast multicast(pull_ranks::host_device(), *engines.back(), memory);
    for (const Case& c : cases) {
      Tensors& tensors = *all.emplace_back(std::make_unique<Tensors>(c, rank));
      tensors.write_input();
      if (c.dtype == DType::float32) tensors.call.algorithm = nullptr;
      c.dtype == DType::float32 ? multicast.run(tensors.call, nullptr) : engines.back()->run(tensors.call, nullptr);
    }
  }
  pull_ranks::execute();
  for (size_t i = 0; i < all.size(); ++i) {
    const Case& c = cases[i % cases.size()];
    std::vector<Bytes> inputs;
    for (int q = 0; q < kWorld; ++q) inputs.push_back(Tensors(c, q).given);
    all[i]->read_output();
    check_report(all[i]->good(expected(c, all[i]->rank, inputs)), __FILE__, __LINE__, describe_case(c) + " in teams");
  }
  for (RingletCudaMulticast& memory : memories) emulated_multicast::release(&memory);
  CHECK_EQ(emulated_multicast::alive(), 0);
}

}  // namespace

int main() {
  for (const int world : {1, 2, 3, 5, 8}) contract(world);
  what_it_serves();
  in_teams();
  without();
  sizes();
  failures();
  return check_result("gpu_multicast");
}
