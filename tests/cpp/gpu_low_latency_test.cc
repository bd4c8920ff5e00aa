// Small all-reduces whose words carry their flags (cuda/low_latency.h), the kernel compiled for the host: the bits of
// one_shot, calls of all sizes one after another and between others, calls that differ, and ranks that do not come.
#include <algorithm>
#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "base/error.h"
#include "check.h"
#include "pull_ranks.h"

using namespace pull_ranks;

namespace {

constexpr size_t kRegion = size_t{5} << 20;

const Algorithm* one_shot() { return find_algorithm(Collective::all_reduce, "one_shot"); }

struct Group {
  explicit Group(int world, bool low = true) : regions(world, kRegion) {
    for (int q = 0; q < world; ++q) {
      GpuPullExecutor::Setup setup = regions.setup(q);
      setup.blocks = 4;
      setup.low_latency = low;
      engines.push_back(std::make_unique<GpuPullExecutor>(host_device(), setup));
    }
  }
  int world() const { return static_cast<int>(engines.size()); }
  Regions regions;
  std::vector<std::unique_ptr<GpuPullExecutor>> engines;
};

using Ranks = std::vector<std::unique_ptr<Tensors>>;

/// Puts the call on every rank's stream; the input is the caller's again at once.
Ranks enqueue(Group& group, const Case& c, bool alike = true) {
  Ranks ranks;
  for (int q = 0; q < group.world(); ++q) {
    Case own = c;
    if (!alike) own.offset += element_size(c.dtype) * static_cast<size_t>(q);
    Tensors& tensors = *ranks.emplace_back(std::make_unique<Tensors>(own, q));
    tensors.write_input();
    group.engines[static_cast<size_t>(q)]->run(tensors.call, nullptr);
    launches[q].push_back([&tensors] {
      tensors.read_output();
      tensors.spoil_input();
    });
  }
  return ranks;
}

void check(const Group& group, const Case& c, const Ranks& ranks, const char* what) {
  std::vector<Bytes> inputs;
  for (const auto& tensors : ranks) inputs.push_back(tensors->given);
  bool ok = true;
  for (int q = 0; q < group.world(); ++q) ok = ok && ranks[static_cast<size_t>(q)]->good(expected(c, q, inputs));
  check_report(ok, __FILE__, __LINE__, describe_case(c) + what);
}

/// All counts, dtypes and offsets, in and out of place.
TEST(contract) {
  for (const int world : {1, 2, 3, 5, 8}) {
    Group group(world);
    for (const DType dtype : {DType::float32, DType::float16, DType::bfloat16}) {
      for (const size_t count : {1, 2, 3, 1023, 2049, 6001}) {
        for (const bool alike : {true, false}) {
          Case c{one_shot(), world, count, dtype, count % 2 == 0 ? ReduceOp::avg : ReduceOp::sum};
          if (c.op == ReduceOp::avg && (world & (world - 1)) != 0) c.op = ReduceOp::sum;  // exact in any order
          c.in_place = count % 3 == 0;
          c.offset = element_size(dtype) * (count % 5);
          const int before = low_launches;
          const Ranks ranks = enqueue(group, c, alike);
          execute();
          CHECK_EQ(low_launches - before, world);
          for (const auto& engine : group.engines) engine->check("a call");
          check(group, c, ranks, alike ? " alike" : " not alike");
        }
      }
    }
  }
}

/// The order of the sum is one_shot's: the same bits as without.
TEST(bits) {
  constexpr int kWorld = 5;
  constexpr size_t kCount = 777;
  std::vector<std::vector<float>> results;
  for (const bool low : {true, false}) {
    Group group(kWorld, low);
    std::vector<std::vector<float>> values(kWorld, std::vector<float>(kCount));
    for (size_t q = 0; q < kWorld; ++q) {
      for (size_t i = 0; i < kCount; ++i) values[q][i] = 1.0f / static_cast<float>(3 * i + 7 * q + 1);
      Call call;
      call.collective = Collective::all_reduce;
      call.algorithm = one_shot();
      call.dtype = DType::float32;
      call.count = kCount;
      call.output = reinterpret_cast<std::byte*>(values[q].data());
      call.input = call.output;
      call.timeout = std::chrono::seconds(60);
      group.engines[q]->run(call, nullptr);
    }
    execute();
    for (const auto& one : values) CHECK(one == values[0]);
    results.push_back(values[0]);
  }
  CHECK(results[0] == results[1]);
}

/// What is under way of one call stays until it is read, whatever comes after it; other kernels come between.
TEST_EACH(one_after_another, bool teams, false, true) {
  in_teams = teams;
  Group group(3);
  std::vector<Case> cases;
  std::vector<Ranks> all;
  for (const size_t count : {6000, 1, 5000, 30, 6000, 2, 2, 1, 4000, 7}) {
    cases.push_back({one_shot(), 3, teams ? std::min<size_t>(count, 700) : count, DType::float32});
    if (count % 4 == 0) cases.push_back({one_shot(), 3, count / 4, DType::int32});
    if (count == 1) cases.push_back({find_algorithm(Collective::all_reduce, "ring"), 3, 50, DType::int32});
  }
  for (int turn = 0; turn < 2; ++turn) {
    for (const Case& c : cases) all.push_back(enqueue(group, c));
  }
  execute();
  for (size_t i = 0; i < all.size(); ++i) check(group, cases[i % cases.size()], all[i], " after others");
  in_teams = false;
}

/// Other dtypes, operations, algorithms and sizes go by a plan.
TEST(what_it_serves) {
  Group group(2);
  const auto low = [&](const Case& c) {
    const int before = low_launches;
    enqueue(group, c);
    launches.clear();
    return low_launches - before == 2;
  };
  CHECK(low({one_shot(), 2, 8192, DType::float32}));
  CHECK(!low({one_shot(), 2, 8193, DType::float32}));  // 4 blocks of 8 KiB
  CHECK(!low({one_shot(), 2, 0, DType::float32}));
  CHECK(!low({one_shot(), 2, 10, DType::float64}));
  CHECK(!low({one_shot(), 2, 10, DType::float32, ReduceOp::max}));
  CHECK(!low({one_shot(), 2, 10, DType::float32, ReduceOp::premul_sum}));
  CHECK(!low({find_algorithm(Collective::all_reduce, "two_shot"), 2, 10, DType::float32}));
}

/// Both calls are named on both ranks, and no result is written.
TEST(other_calls) {
  Group group(2);
  Ranks ranks;
  for (int q = 0; q < 2; ++q) {
    Tensors& tensors = *ranks.emplace_back(
        std::make_unique<Tensors>(Case{one_shot(), 2, q == 0 ? size_t{1000} : size_t{5000}, DType::float32}, q));
    tensors.call.sequence = 7;
    tensors.write_input();
    tensors.read_output();
    group.engines[static_cast<size_t>(q)]->run(tensors.call, nullptr);
  }
  const Bytes before = ranks[1]->seen;
  execute();
  for (int q = 0; q < 2; ++q) {
    CHECK_HAS(CHECK_THROWS(InvalidUsage, group.engines[static_cast<size_t>(q)]->check("a call")), "calls do not match",
              "all_reduce #7 (one_shot, sum, float32, 1000 elements)",
              "all_reduce #7 (one_shot, sum, float32, 5000 elements)");
  }
  ranks[1]->read_output();
  CHECK(ranks[1]->seen == before);
}

/// A rank whose call goes by a plan hears what the other one calls, and names both.
TEST(a_call_of_another_kind) {
  Group group(2);
  Ranks ranks;
  for (int q = 0; q < 2; ++q) {
    const DType dtype = q == 0 ? DType::float32 : DType::int32;
    Tensors& tensors = *ranks.emplace_back(std::make_unique<Tensors>(Case{one_shot(), 2, 1000, dtype}, q));
    if (q == 0) tensors.call.timeout = std::chrono::milliseconds(50);  // in a group its host hears of it before
    tensors.write_input();
    group.engines[static_cast<size_t>(q)]->run(tensors.call, nullptr);
  }
  execute();
  CHECK_HAS(CHECK_THROWS(InvalidUsage, group.engines[1]->check("a call")),
            "all_reduce #0 (one_shot, sum, float32, 1000 elements)",
            "all_reduce #0 (one_shot, sum, int32, 1000 elements)");
  CHECK_THROWS(Timeout, group.engines[0]->check("a call"));
}

TEST(a_missing_rank) {
  Group group(3);
  for (const size_t q : {size_t{0}, size_t{1}}) {
    const auto tensors = std::make_shared<Tensors>(Case{one_shot(), 3, 1000, DType::float32}, static_cast<int>(q));
    tensors->call.timeout = std::chrono::milliseconds(20);
    group.engines[q]->run(tensors->call, nullptr);
    launches[static_cast<int>(q)].push_back([tensors] {});
  }
  execute();
  CHECK_HAS(CHECK_THROWS(Timeout, group.engines[0]->check("a call")), "for rank 2");
  CHECK_THROWS(Timeout, group.engines[1]->check("a call"));
}

}  // namespace
