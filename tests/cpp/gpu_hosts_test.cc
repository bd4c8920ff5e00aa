// Groups on GPUs of several hosts, ranks as threads on a GPU and a NCCL of the host that run (emulated_gpu.cc): peers'
// memory inside hosts, NCCL between them.
#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "check.h"
#include "collective_cases.h"
#include "comm/gpu_group.h"
#include "emulated_gpu.h"
#include "gpu_ranks.h"

using namespace gpu_ranks;
using namespace collective_cases;

namespace {

struct Hosts {
  Between between;
  int world;
};
constexpr Hosts kHosts[] = {{Between::twos, 4}, {Between::threes, 6}, {Between::twos, 6}};

/// Whether a kernel ran on peers' memory since this was asked last; by one rank, between calls of the host's group.
bool went_through_peers(Communicator& host) {
  static std::atomic<bool> answer{false};
  host.run(Call{});
  if (host.rank() == 0) answer = emulated_gpu_most_blocks() > 0;
  host.run(Call{});
  return answer;
}

void run(Communicator& host, GpuGroup& group, const Case& c, bool by_name, void* stream) {
  Tensors tensors(c, host.rank());
  tensors.write_input();
  if (!by_name) tensors.call.algorithm = nullptr;
  group.run(tensors.call, stream)->wait(kLong);
  std::vector<Bytes> inputs;
  for (int q = 0; q < c.world; ++q) inputs.push_back(Tensors(c, q).given);
  tensors.read_output();
  check_report(tensors.good(expected(c, host.rank(), inputs)), __FILE__, __LINE__, describe_case(c));
}

/// All counts, dtypes and operations; shards of no elements; every root.
void contract(const Hosts& hosts) {
  no_errors(run_ranks(hosts.world, hosts.between, [&](Communicator& host) {
    GpuGroup group(host, parts());
    const StreamOwner own;
    CHECK_EQ(group.describe(), "peer memory up to 1048576 bytes inside hosts, NCCL 2.28.9 between them and beyond");
    went_through_peers(host);
    const Algorithm* reduces = find_algorithm(Collective::all_reduce, "hierarchical");
    for (const size_t count : {0, 1, 2, 1237, 60001}) {
      for (const bool in_place : {true, false}) {
        run(host, group, {reduces, hosts.world, count, DType::int32, ReduceOp::sum, in_place}, in_place, own.stream);
      }
    }
    CHECK(went_through_peers(host));
    for (int d = 0; d < kDTypes; ++d) {
      for (int o = 0; o < kReduceOps; ++o) {
        Case c{reduces, hosts.world, 123, static_cast<DType>(d), static_cast<ReduceOp>(o), (d + o) % 2 == 0};
        c.offset = element_size(c.dtype);
        if (supports(c.dtype, c.op)) run(host, group, c, d % 2 == 0, own.stream);
      }
    }
    went_through_peers(host);
    for (int root = 0; root < hosts.world; ++root) {
      Case c{find_algorithm(Collective::broadcast, "hierarchical"), hosts.world, root == 1 ? size_t{0} : 1237};
      c.seed = static_cast<unsigned>(root);
      c.in_place = root % 2 == 0;
      run(host, group, c, root > 2, own.stream);
    }
    CHECK(went_through_peers(host));
  }));
}

/// What is longer, has another algorithm or another shape goes through NCCL alone.
void through_nccl() {
  no_errors(run_ranks(4, Between::twos, [&](Communicator& host) {
    GpuGroup group(host, parts());
    const StreamOwner own;
    const auto goes = [&](Collective which, const char* algorithm, size_t count) {
      went_through_peers(host);
      run(host, group, {find_algorithm(which, algorithm), 4, count}, true, own.stream);
      return went_through_peers(host);
    };
    CHECK(goes(Collective::all_reduce, "hierarchical", 1000));
    CHECK(!goes(Collective::all_reduce, "ring", 1000));
    CHECK(!goes(Collective::all_reduce, "hierarchical", 300000));
    CHECK(!goes(Collective::all_gather, "two_shot", 1000));
    CHECK(!goes(Collective::all_to_all, "pairwise", 1000));
  }));
}

/// Without equally many ranks on all hosts, or several on one, NCCL alone serves the group; without NCCL nothing does.
void without() {
  const auto described = [](Between between, int world, const char* why) {
    no_errors(run_ranks(world, between, [&](Communicator& host) {
      Floats floats(host.rank());
      const StreamOwner own;
      GpuGroup group(host, parts());
      CHECK(group.describe().find(why) != std::string::npos);
      group.run(floats.call, own.stream)->wait(kLong);
      CHECK_EQ(floats.values[0], static_cast<float>(world * (world + 1) / 2));
    }));
  };
  described(Between::twos, 5, "no peer memory; rank 0: hosts with different numbers of ranks");
  described(Between::tcp, 2, "no peer memory; rank 0: no host has several ranks");
  std::atomic<int> told{0};
  no_errors(run_ranks(4, Between::twos, [&](Communicator& host) {
    const std::string message = CHECK_THROWS(DeviceError, GpuGroup(host, host.rank() == 2 ? without_nccl() : parts()));
    told += message.find("rank 2: no NCCL: gone fishing") != std::string::npos;
  }));
  CHECK_EQ(told.load(), 4);
}

/// Ranks of a host that call different things, and a rank that does not come: named by their numbers in the group. On
/// other hosts no call ends well with a shard that is not one.
void failures() {
  std::atomic<int> told{0};
  no_errors(run_ranks(4, Between::twos, [&](Communicator& host) {
    Floats floats(host.rank());  // kept until the stream has come to its end
    const StreamOwner own;
    GpuGroup group(host, parts());
    if (host.rank() == 3) floats.call.op = ReduceOp::max;
    const auto run = [&] { group.run(floats.call, own.stream)->wait(kSoon); };
    if (host.rank() < 2) {  // its device may say that a rank gave up before that rank's host says why
      CHECK_THROWS(Error, run());
      return;
    }
    const std::string message = CHECK_THROWS(InvalidUsage, run());
    told += message.find("calls do not match") != std::string::npos &&
            message.find(", max, float32") != std::string::npos &&
            (message.find("rank 2 called") != std::string::npos || message.find("rank 3 called") != std::string::npos);
  }));
  CHECK_EQ(told.load(), 2);
  told = 0;
  no_errors(run_ranks(4, Between::twos, [&](Communicator& host) {
    Floats floats(host.rank());
    const StreamOwner own;
    GpuGroup group(host, parts());
    if (host.rank() == 3) {
      const Deadline deadline = Deadline::after(kSoon);
      CHECK_THROWS(Timeout, while (!deadline.passed()) host.poll_failures(););
      return;
    }
    floats.call.timeout = std::chrono::milliseconds(200);
    CHECK_THROWS(Timeout, group.run(floats.call, own.stream)->wait(kSoon));
    CHECK_THROWS(Timeout, group.run(floats.call, own.stream));
    ++told;
  }));
  CHECK_EQ(told.load(), 3);
}

}  // namespace

int main() {
  for (const Hosts& hosts : kHosts) contract(hosts);
  through_nccl();
  without();
  failures();
  return check_result("gpu_hosts");
}
