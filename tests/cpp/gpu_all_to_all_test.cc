// An all-to-all through the memory of peers' GPUs, whose kernel is compiled for the host: blocks of all lengths, lying
// anywhere, staged and read in place; lengths that do not fit; ranks that do not come.
#include <algorithm>
#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "base/error.h"
#include "check.h"
#include "pull_ranks.h"
#include "uneven_blocks.h"

using namespace pull_ranks;
using namespace uneven_blocks;

namespace {

struct Exchanging {
  Exchanging(const Shape& shape, int rank, int world, const Regions& regions, bool registered)
      : blocks(shape, rank, world), engine(host_device(), regions.setup(rank, registered)) {
    call.collective = Collective::all_to_all;
    call.dtype = DType::int32;
    call.count = blocks.blocks.longest;
    call.blocks = &blocks.blocks;
    call.timeout = std::chrono::seconds(60);
  }
  UnevenRank blocks;
  GpuPullExecutor engine;
  Call call;
};

using Group = std::vector<std::unique_ptr<Exchanging>>;

Group group_of(const Shape& shape, int world, const Regions& regions, const std::vector<bool>& registered) {
  Group ranks;
  for (int q = 0; q < world; ++q) {
    ranks.push_back(std::make_unique<Exchanging>(shape, q, world, regions, registered[static_cast<size_t>(q)]));
  }
  return ranks;
}

/// Several calls one after another; the inputs are the callers' again after each.
void run_thrice(Group& ranks, const std::string& what) {
  bool right = true;
  for (int i = 0; i < 3; ++i) {
    for (auto& rank : ranks) {
      rank->engine.run(rank->call, nullptr);
      launches[static_cast<int>(&rank - ranks.data())].push_back([&given = rank->blocks.in, i] {
        for (Values& values : given) {
          for (int32_t& value : values) value += i == 0 ? 1 : i == 1 ? -1 : 0;
        }
      });
    }
  }
  execute();
  for (auto& rank : ranks) {
    rank->engine.check("a call");
    right = right && rank->blocks.out == rank->blocks.wanted;
  }
  check_report(right, __FILE__, __LINE__, what);
}

/// Some of no length at all, some of many pieces: then others' blocks have long been over.
TEST(all_lengths) {
  for (const int world : {1, 2, 3, 5, 9}) {
    for (const size_t unit : {0, 1, 100, 3001}) {
      for (const int registered : {0, 1, 2}) {
        if (world > 5 && unit > 100) continue;
        const size_t region = world > 5 ? size_t{64} << 10 : size_t{24} << 10;
        const Regions regions(world, region);
        std::vector<bool> in_heap;
        for (int q = 0; q < world; ++q) in_heap.push_back(registered == 2 || (registered == 1 && q % 2 == 0));
        Group ranks = group_of({Collective::all_to_all, unit}, world, regions, in_heap);
        run_thrice(ranks, "world " + std::to_string(world) + " unit " + std::to_string(unit) + " registered " +
                              std::to_string(registered));
        if (registered == 2) {
          for (int q = 0; q < world; ++q) CHECK(!regions.staged(q));
        }
      }
    }
  }
}

/// With a host thread for each thread of a block.
TEST(teams) {
  in_teams = true;
  for (const bool registered : {false, true}) {
    const Regions regions(3, size_t{24} << 10);
    Group ranks = group_of({Collective::all_to_all, 300}, 3, regions, std::vector<bool>(3, registered));
    run_thrice(ranks, registered ? "teams, registered" : "teams");
  }
  in_teams = false;
}

/// Packs meet packs wherever the receiver's block begins: what is staged for it lies as far past a pack's start.
TEST(unaligned) {
  const Regions regions(2, size_t{256} << 10);
  Group ranks = group_of({Collective::all_to_all, 500}, 2, regions, {false, false});
  std::vector<Values> moved(2);
  for (size_t q = 0; q < 2; ++q) {
    Exchanging& rank = *ranks[q];
    std::vector<std::byte*>& outputs = rank.blocks.blocks.outputs;
    Values& own = moved[q] = Values(rank.blocks.out[1 - q].size() + 4);
    outputs[1 - q] = bytes(own) + 4 * (q + 1);
  }
  std::atomic<int> unpacked{0};
  before_split = [&](const cuda::PullShared& shared) {
    for (size_t q = 0; q < 2; ++q) {
      const auto* end = reinterpret_cast<std::byte*>(moved[q].data() + moved[q].size());
      const bool takes = shared.works[0].dst >= bytes(moved[q]) && shared.works[0].dst < end;
      unpacked += takes && shared.works[0].count > 64 && shared.works[0].packs == 0;
    }
  };
  for (auto& rank : ranks) rank->engine.run(rank->call, nullptr);
  execute();
  before_split = nullptr;
  CHECK_EQ(unpacked.load(), 0);
  for (size_t q = 0; q < 2; ++q) {
    const Values& wanted = ranks[q]->blocks.wanted[1 - q];
    CHECK(!wanted.empty() && std::equal(wanted.begin(), wanted.end(), moved[q].begin() + static_cast<int>(q) + 1));
  }
}

/// A rank that gets another length than it expects says so; nothing of that call has moved.
TEST(lengths_that_differ) {
  for (const bool registered : {false, true}) {
    const Regions regions(2, size_t{24} << 10);
    Group ranks = group_of({Collective::all_to_all, 100}, 2, regions, {registered, registered});
    Exchanging& zero = *ranks[0];
    zero.blocks.blocks.counts[3] -= 7;  // of what rank 1 sends rank 0: 500
    const std::vector<Values> before = zero.blocks.out;
    ranks[1]->call.timeout = std::chrono::milliseconds(50);
    for (auto& rank : ranks) rank->engine.run(rank->call, nullptr);
    execute();
    const std::string message = CHECK_THROWS(InvalidUsage, zero.engine.check(zero.engine.last_call()));
    CHECK(message.find("rank 0 of 2 in or before all_to_all #0 (pairwise, int32, ") == 0);
    CHECK_HAS(message, "rank 1 sends rank 0 500 elements, and rank 0 expects 493");
    CHECK(zero.blocks.out == before);
    CHECK_THROWS(Timeout, ranks[1]->engine.check("a call"));
  }
  const Regions regions(2, size_t{24} << 10);
  Group ranks = group_of({Collective::all_to_all, 100}, 2, regions, {false, false});
  ranks[0]->blocks.blocks.counts[2] += 1;
  CHECK_HAS(CHECK_THROWS(InvalidUsage, ranks[0]->engine.run(ranks[0]->call, nullptr)),
            "rank 0 sends itself 0 elements and expects 1");
}

/// Equal blocks in one tensor on one rank, the same as a list on another: the same call. Another collective is not.
TEST(what_is_the_same) {
  const Regions regions(2, size_t{24} << 10);
  Group ranks = group_of({Collective::all_to_all, 0}, 2, regions, {false, false});
  for (auto& rank : ranks) {
    for (auto* all : {&rank->blocks.in, &rank->blocks.out}) {
      for (Values& values : *all) values.assign(50, static_cast<int32_t>(&rank - ranks.data()) + 7);
    }
    Blocks& blocks = rank->blocks.blocks;
    blocks.counts.assign(4, 50);
    for (size_t q = 0; q < 2; ++q) {
      blocks.inputs[q] = bytes(rank->blocks.in[q]);
      blocks.outputs[q] = bytes(rank->blocks.out[q]);
    }
    rank->call.count = 50;
  }
  Values input(100, 3), output(100);
  Call whole = ranks[0]->call;
  whole.blocks = nullptr;
  whole.input = bytes(input);
  whole.output = bytes(output);
  ranks[0]->engine.run(whole, nullptr);
  ranks[1]->engine.run(ranks[1]->call, nullptr);
  execute();
  for (auto& rank : ranks) rank->engine.check("a call");
  CHECK(output[0] == 3 && output[49] == 3 && output[50] == 8 && output[99] == 8 && ranks[1]->blocks.out[0][49] == 3);
  whole.collective = Collective::all_gather;
  whole.timeout = std::chrono::milliseconds(50);
  ranks[0]->engine.run(whole, nullptr);
  ranks[1]->engine.run(ranks[1]->call, nullptr);
  execute();
  CHECK_HAS(CHECK_THROWS(InvalidUsage, ranks[1]->engine.check("a call")), "calls do not match", "all_gather");
  CHECK_THROWS(Timeout, ranks[0]->engine.check("a call"));  // in a group its host hears of it before
}

/// The others end in time, and say for whom they waited.
TEST(a_missing_rank) {
  const Regions regions(3, size_t{24} << 10);
  Group ranks = group_of({Collective::all_to_all, 100}, 3, regions, {false, false, false});
  for (const size_t q : {size_t{0}, size_t{1}}) {
    ranks[q]->call.timeout = std::chrono::milliseconds(20);
    ranks[q]->engine.run(ranks[q]->call, nullptr);
  }
  execute();
  CHECK_HAS(CHECK_THROWS(Timeout, ranks[0]->engine.check("a call")), "for rank 2");
  CHECK_THROWS(Timeout, ranks[1]->engine.check("a call"));
}

TEST(refusals) {
  const Regions regions(2, 768);
  Group ranks = group_of({Collective::all_to_all, 100}, 2, regions, {false, false});
  CHECK_HAS(CHECK_THROWS(InvalidUsage, ranks[0]->engine.run(ranks[0]->call, nullptr)),
            "regions of 768 bytes have no room");
}

}  // namespace
