// A group's GPU part, ranks as threads on a GPU and a NCCL of the host that run (live_gpu.cc): that ranks find together what they
// have, that calls follow streams, and what becomes of a call that is never done.
#include "comm/gpu_group.h"

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "check.h"
#include "collective_cases.h"
#include "ranks.h"

using namespace ringlet;
using namespace collective_cases;

namespace {

const RingletCudaDevice& device() { return *ringlet_cuda_device(); }

GpuGroup::Parts parts() {
  static const NcclApi api = open_nccl({{LIVE_GPU}});
  return {&device(), &api, ""};
}

struct StreamOwner {
  StreamOwner() { device().create_stream(&stream); }
  ~StreamOwner() { device().destroy_stream(stream); }
  StreamOwner(const StreamOwner&) = delete;
  void* stream = nullptr;
};

void no_errors(const std::vector<std::string>& errors) {
  for (const std::string& error : errors) CHECK_EQ(error, "");
}

const auto kLong = std::chrono::seconds(60);

/// All algorithms and a few dtypes, several calls under way at once on two streams.
void contract() {
  for (const int world : {1, 2, 3, 4, 5}) {
    no_errors(run_ranks(world, Between::one_memory, [&](Communicator& host) {
      std::vector<std::unique_ptr<Tensors>> all;
      const StreamOwner one, two;
      GpuGroup group(host, parts());
      std::vector<std::shared_ptr<Work>> works;
      std::vector<Case> cases;
      for (const Algorithm& algorithm : algorithms()) {
        for (const size_t count : {size_t{1}, size_t{1237}, size_t{2000003}}) {
          if (count > 10000 && cases.size() % 4 != 0) continue;
          cases.push_back({&algorithm, world, algorithm.collective == Collective::barrier ? 0 : count});
        }
      }
      for (size_t i = 0; i < cases.size(); ++i) {
        all.push_back(std::make_unique<Tensors>(cases[i], host.rank()));
        all[i]->write_input();
        works.push_back(group.run(all[i]->call, i % 3 == 0 ? one.stream : two.stream));
      }
      for (size_t i = 0; i < cases.size(); ++i) {
        works[i]->wait(kLong);
        std::vector<Bytes> inputs;
        for (int q = 0; q < world; ++q) inputs.push_back(Tensors(cases[i], q).given);
        all[i]->read_output();
        check_report(all[i]->good(expected(cases[i], host.rank(), inputs)), __FILE__, __LINE__,
                     describe_case(cases[i]));
      }
    }));
  }
}

struct Floats {
  explicit Floats(int rank, size_t count = 1000) : values(count, static_cast<float>(rank + 1)) {
    call.collective = Collective::all_reduce;
    call.dtype = DType::float32;
    call.count = count;
    call.input = reinterpret_cast<const std::byte*>(values.data());
    call.output = reinterpret_cast<std::byte*>(values.data());
  }
  std::vector<float> values;
  Call call;
};

/// A rank that lacks something is named on all, and the host's group goes on.
void lacking() {
  std::atomic<int> told{0};
  no_errors(run_ranks(3, Between::one_memory, [&](Communicator& host) {
    const GpuGroup::Parts mine =
        host.rank() == 1 ? GpuGroup::Parts{nullptr, nullptr, "no NCCL: gone fishing"} : parts();
    const std::string message = CHECK_THROWS(DeviceError, GpuGroup(host, mine));
    told += message.find("rank 1: no NCCL: gone fishing") != std::string::npos &&
            message.find("rank " + std::to_string(host.rank()) + " of 3") != std::string::npos;
    Floats floats(host.rank());
    host.run(floats.call);
    CHECK_EQ(floats.values[999], 6.0f);
    GpuGroup group(host, parts());
    group.run(floats.call, nullptr)->wait(kLong);
    CHECK_EQ(floats.values[999], 18.0f);
  }));
  CHECK_EQ(told.load(), 3);
}

/// The host is free while the device waits for a rank that comes later.
void asynchronous() {
  std::atomic<bool> came{false};
  no_errors(run_ranks(2, Between::one_memory, [&](Communicator& host) {
    Floats floats(host.rank(), 300000);
    const StreamOwner own;
    GpuGroup group(host, parts());
    if (host.rank() == 1) {
      while (!came) std::this_thread::yield();
    }
    const auto work = group.run(floats.call, own.stream);
    if (host.rank() == 0) CHECK(!work->done());
    came = true;
    work->wait(kLong);
    CHECK_EQ(floats.values[299999], 3.0f);
  }));
}

/// What runs at a call's completion may make the next one.
void completions() {
  no_errors(run_ranks(2, Between::one_memory, [&](Communicator& host) {
    Work all;
    Floats floats(host.rank());
    GpuGroup group(host, parts());
    group.run(floats.call, nullptr)->then([&](std::exception_ptr error) {
      CHECK(error == nullptr && group.is_this_thread());
      group.run(floats.call, nullptr)->then([&](std::exception_ptr second) { all.complete(second); });
    });
    all.wait(kLong);
    CHECK_EQ(floats.values[0], 6.0f);
  }));
}

/// A rank that does not come: Timeout at the deadline for this call and those behind it, and for the host's group.
void timeouts() {
  no_errors(run_ranks(2, Between::one_memory, [&](Communicator& host) {
    Floats floats(host.rank());
    const StreamOwner own;
    GpuGroup group(host, parts());
    if (host.rank() == 1) return;
    floats.call.timeout = std::chrono::milliseconds(50);
    const auto first = group.run(floats.call, own.stream), second = group.run(floats.call, own.stream);
    const std::string message = CHECK_THROWS(Timeout, first->wait(kLong));
    CHECK(message.find("all_reduce #0") != std::string::npos && message.find("rank 0 of 2") != std::string::npos);
    CHECK_THROWS(Timeout, second->wait(kLong));
    CHECK_THROWS(Timeout, group.run(floats.call, own.stream));
    CHECK(host.failure() == ErrorKind::timeout);
  }));
}

/// Closed or aborted with a call pending: it ends with an error, and nothing waits for ever.
void endings() {
  no_errors(run_ranks(2, Between::one_memory, [&](Communicator& host) {
    Floats floats(host.rank());
    const StreamOwner own;
    std::shared_ptr<Work> work;
    {
      GpuGroup group(host, parts());
      if (host.rank() == 0) work = group.run(floats.call, own.stream);
    }
    if (host.rank() == 0) {
      const std::string message = CHECK_THROWS(InvalidUsage, work->wait(kLong));
      CHECK(message.find("closed before") != std::string::npos);
    }
  }));
  no_errors(run_ranks(2, Between::one_memory, [&](Communicator& host) {
    Floats floats(host.rank());
    const StreamOwner own;
    GpuGroup group(host, parts());
    if (host.rank() == 1) return;
    const auto work = group.run(floats.call, own.stream);
    group.abort("enough");
    const std::string message = CHECK_THROWS(PeerLost, work->wait(kLong));
    CHECK(message.find("enough") != std::string::npos);
    CHECK_THROWS(PeerLost, group.run(floats.call, own.stream));
  }));
}

/// Wrong calls are refused before anything moves, and do not count.
void refusals() {
  no_errors(run_ranks(2, Between::one_memory, [&](Communicator& host) {
    Floats floats(host.rank());
    GpuGroup group(host, parts());
    if (host.rank() == 0) {
      Call wrong = floats.call;
      wrong.op = ReduceOp::band;
      CHECK_THROWS(InvalidUsage, group.run(wrong, nullptr));
      wrong = floats.call;
      wrong.collective = Collective::broadcast;
      wrong.root = 2;
      CHECK_THROWS(InvalidUsage, group.run(wrong, nullptr));
    }
    group.run(floats.call, nullptr)->wait(kLong);
    CHECK_EQ(floats.values[0], 3.0f);
  }));
}

}  // namespace

int main() {
  contract();
  lacking();
  asynchronous();
  completions();
  timeouts();
  endings();
  refusals();
  return check_result("gpu_group");
}
