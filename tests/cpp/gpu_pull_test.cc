// The GPU's pull kernel compiled for the host, with a host thread for each block: the same plans, address arithmetic,
// waits and publications. Every algorithm, staged and in place, in and out of place; under ThreadSanitizer a missing
// wait is a data race. Some with a host thread for each thread of a block: there a missing barrier is one.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <thread>

#include "base/error.h"
#include "check.h"
#include "collective_cases.h"
#include "pull_ranks.h"

using namespace ringlet;
using namespace collective_cases;
using namespace pull_ranks;

namespace {

/// Which ranks' tensors are in their heaps.
enum class Registered { none, some, all };

void run_case(const Case& c, Registered registered, size_t region_bytes, int calls = 1) {
  const Regions regions(c.world, region_bytes);
  std::vector<std::unique_ptr<Rank>> ranks;
  std::vector<Bytes> inputs;
  for (int q = 0; q < c.world; ++q) {
    const bool own = registered == Registered::all || (registered == Registered::some && q % 2 == 0);
    ranks.push_back(std::make_unique<Rank>(c, q, regions, own));
    inputs.push_back(ranks.back()->tensors.given);
  }
  for (int i = 0; i < calls; ++i) {
    for (auto& rank : ranks) {
      rank->engine.run(rank->tensors.call, nullptr);
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
    rank.engine.check("a call");
    ok = ok && rank.tensors.good(expected(c, q, inputs));
  }
  const char* kinds[] = {" staged", " staged by some", " registered"};
  check_report(ok, __FILE__, __LINE__, describe_case(c) + kinds[static_cast<int>(registered)]);
}

TEST(every_algorithm) {
  int number = 0;
  for (const Algorithm& algorithm : algorithms()) {
    for (const int world : {1, 2, 3, 4, 5}) {
      if (kSanitized && world % 2 == 0) continue;
      for (const size_t count : {0, 1, world - 1, world + 1, 2347}) {
        for (const bool in_place : {false, true}) {
          for (const Registered registered : {Registered::none, Registered::some, Registered::all}) {
            if (registered == Registered::some && (world < 2 || count < 2)) continue;
            Case c{&algorithm, world, algorithm.collective == Collective::barrier ? 0 : count};
            c.in_place = in_place;
            c.seed = static_cast<unsigned>(count) % 11;
            c.offset = 4 * (count % 3);
            // Pieces of at most some hundred elements, so several for each block.
            if (has_place(c) && !is_left_out(number, 5)) run_case(c, registered, size_t{24} << 10, /*calls=*/2);
          }
        }
      }
    }
  }
}

TEST(teams) {
  in_teams = true;
  for (const Algorithm& algorithm : algorithms()) {
    for (const size_t count : {2, 947}) {
      for (const bool in_place : {false, true}) {
        for (const Registered registered : {Registered::none, Registered::all}) {
          Case c{&algorithm, 3, algorithm.collective == Collective::barrier ? 0 : count};
          c.in_place = in_place;
          c.offset = 4 * (count % 3);
          if (has_place(c)) run_case(c, registered, size_t{24} << 10, /*calls=*/2);
        }
      }
    }
  }
  in_teams = false;
}

TEST(every_dtype_and_operation) {
  for (const char* name : {"ring", "two_shot"}) {
    for (int d = 0; d < kDTypes; ++d) {
      for (int o = 0; o < kReduceOps; ++o) {
        Case c{find_algorithm(Collective::all_reduce, name), 3, 1237, static_cast<DType>(d), static_cast<ReduceOp>(o)};
        if (!supports(c.dtype, c.op)) continue;
        c.in_place = (d + o) % 2 == 0;
        c.offset = element_size(c.dtype);
        for (const Registered registered : {Registered::none, Registered::all})
          run_case(c, registered, size_t{24} << 10);
      }
    }
  }
}

/// A rank that does not come: the others' blocks end within their time, say who was missing, and later ones end at
/// once.
TEST(a_missing_rank) {
  Case c{find_algorithm(Collective::all_reduce, "ring"), 3, 1000};
  const Regions regions(3, size_t{24} << 10);
  Rank zero(c, 0, regions), one(c, 1, regions);
  for (Rank* rank : {&zero, &one}) {
    rank->tensors.call.timeout = std::chrono::milliseconds(20);
    rank->engine.run(rank->tensors.call, nullptr);
  }
  execute();
  const std::string message = CHECK_THROWS(Timeout, zero.engine.check(zero.engine.last_call()));
  const char* call = "rank 0 of 3 in or before all_reduce #0 (ring, sum, int32, 1000 elements)";
  CHECK_HAS(message, call, "for rank 2");
  CHECK_THROWS(Timeout, one.engine.check("a call"));
  zero.tensors.call.timeout = std::chrono::hours(24);
  zero.engine.run(zero.tensors.call, nullptr);
  execute();
  CHECK_THROWS(Timeout, zero.engine.check("a call"));
}

/// The root gives up while a peer reads its tensor, and has it back: the peer's call is no success, though all has
/// come.
TEST(a_root_that_gives_up) {
  const Case c{find_algorithm(Collective::broadcast, "tree"), 2, 1000};
  const Regions regions(2, size_t{24} << 10);
  Rank root(c, c.root(), regions, true), peer(c, 1 - c.root(), regions, true);
  root.tensors.call.timeout = std::chrono::milliseconds(20);
  root.engine.run(root.tensors.call, nullptr);
  peer.engine.run(peer.tensors.call, nullptr);
  std::atomic<bool> let_go{false};
  launches[c.root()].push_back([&] { let_go = true; });
  before_split = [&](const cuda::PullShared& shared) {
    while (shared.works[0].dst == peer.tensors.call.output && !let_go) std::this_thread::yield();
  };
  execute();
  before_split = nullptr;
  CHECK_THROWS(Timeout, root.engine.check("a call"));
  CHECK_HAS(CHECK_THROWS(Timeout, peer.engine.check("a call")),
            "rank " + std::to_string(c.root()) + " gave its call up");
}

/// Whole messages are read where they lie if all ranks' can be, and go through staging buffers if one rank's cannot.
TEST(read_in_place) {
  const Case c{find_algorithm(Collective::all_reduce, "one_shot"), 3, 1000};
  for (const bool all : {true, false}) {
    const Regions regions(3, size_t{24} << 10);
    Rank zero(c, 0, regions, true), one(c, 1, regions, all), two(c, 2, regions, true);
    for (Rank* rank : {&zero, &one, &two}) rank->engine.run(rank->tensors.call, nullptr);
    execute();
    for (int q = 0; q < 3; ++q) CHECK_EQ(regions.staged(q), !all);
  }
}

/// Tensors that begin anywhere: what is staged lies as far past a pack's start as its rank's tensor, so packs meet packs
/// where all ranks' tensors lie alike. Where they do not, elements move one by one, and the result is the same.
TEST(unaligned_tensors) {
  for (const bool alike : {true, false}) {
    for (const char* name : {"one_shot", "two_shot", "ring"}) {
      Case c{find_algorithm(Collective::all_reduce, name), 3, 4096};
      const Regions regions(c.world, size_t{256} << 10);
      std::vector<std::unique_ptr<Rank>> ranks;
      std::vector<Bytes> inputs;
      for (int q = 0; q < c.world; ++q) {
        c.offset = alike ? 4 : 4 * static_cast<size_t>(q);
        ranks.push_back(std::make_unique<Rank>(c, q, regions));
        inputs.push_back(ranks.back()->tensors.given);
      }
      std::atomic<int> works{0}, one_by_one{0};
      before_split = [&](const cuda::PullShared& shared) {
        ++works;
        one_by_one += shared.works[0].packs == 0;
      };
      for (auto& rank : ranks) rank->engine.run(rank->tensors.call, nullptr);
      execute();
      before_split = nullptr;
      CHECK(works > 0 && (one_by_one == 0) == alike);
      for (int q = 0; q < c.world; ++q) {
        Tensors& tensors = ranks[static_cast<size_t>(q)]->tensors;
        tensors.read_output();
        check_report(tensors.good(expected(c, q, inputs)), __FILE__, __LINE__, describe_case(c) + " unaligned");
      }
    }
  }
}

/// Small messages take few blocks, large ones all that a rank has.
TEST(blocks_by_size) {
  const Regions regions(2, size_t{8} << 20);
  const auto blocks = [&](size_t count, int most) {
    GpuPullExecutor::Setup setup = regions.setup(0);
    setup.blocks = most;
    GpuPullExecutor engine(host_device(), setup);
    Tensors tensors({find_algorithm(Collective::all_reduce, "one_shot"), 2, count}, 0);
    engine.run(tensors.call, nullptr);
    launches.clear();
    return last_args.blocks;
  };
  CHECK_EQ(blocks(1000, 32), 16);
  CHECK_EQ(blocks(65536, 32), 16);
  CHECK_EQ(blocks(65537, 32), 32);
  CHECK_EQ(blocks(1000, 8), 8);
  CHECK_EQ(blocks(65537, 8), 8);
}

/// Calls of all shapes one after another: what one leaves in its staging buffers must stay until its readers are done.
TEST(one_after_another) {
  constexpr int kWorld = 3;
  const Regions regions(kWorld, size_t{64} << 10);
  std::vector<std::unique_ptr<GpuPullExecutor>> engines;
  for (int q = 0; q < kWorld; ++q) {
    engines.push_back(std::make_unique<GpuPullExecutor>(host_device(), regions.setup(q)));
  }
  std::vector<std::vector<std::unique_ptr<Tensors>>> all;
  std::vector<Case> cases;
  for (int turn = 0; turn < 4; ++turn) {
    for (const Algorithm& algorithm : algorithms()) {
      const size_t count = std::vector<size_t>{1, 5000, 30, 1237}[(cases.size() + static_cast<size_t>(turn)) % 4];
      cases.push_back({&algorithm, kWorld, algorithm.collective == Collective::barrier ? 0 : count});
    }
  }
  for (const Case& c : cases) {
    all.emplace_back();
    for (int q = 0; q < kWorld; ++q) {
      Tensors& tensors = *all.back().emplace_back(std::make_unique<Tensors>(c, q));
      tensors.write_input();
      engines[static_cast<size_t>(q)]->run(tensors.call, nullptr);
    }
  }
  execute();
  for (size_t i = 0; i < cases.size(); ++i) {
    bool ok = true;
    std::vector<Bytes> inputs;
    for (const auto& tensors : all[i]) inputs.push_back(tensors->given);
    for (int q = 0; q < kWorld; ++q) {
      Tensors& tensors = *all[i][static_cast<size_t>(q)];
      tensors.read_output();
      ok = ok && tensors.good(expected(cases[i], q, inputs));
    }
    check_report(ok, __FILE__, __LINE__, describe_case(cases[i]) + " after others");
  }
}

/// Ranks that call different things: both are named on every rank that waits for the other, and nothing is waited out.
TEST(other_calls) {
  const Case c{find_algorithm(Collective::all_reduce, "ring"), 2, 1000};
  const Case others[] = {{c.algorithm, 2, 1000, DType::int32, ReduceOp::max},
                         {c.algorithm, 2, 999},
                         {c.algorithm, 2, 1000, DType::float32},
                         {find_algorithm(Collective::all_reduce, "butterfly"), 2, 1000}};
  for (const Case& other : others) {
    for (const bool registered : {false, true}) {
      const Regions regions(2, size_t{24} << 10);
      Rank zero(c, 0, regions, registered), one(other, 1, regions, registered);
      for (Rank* rank : {&zero, &one}) {
        rank->tensors.call.sequence = 7;
        rank->engine.run(rank->tensors.call, nullptr);
      }
      execute();
      for (Rank* rank : {&zero, &one}) {
        CHECK_HAS(CHECK_THROWS(InvalidUsage, rank->engine.check("a call")), "calls do not match",
                  "all_reduce #7 (ring, sum, int32, 1000 elements)", describe(one.tensors.call));
      }
    }
  }
}

/// A message is cut for all blocks to have work, down to what a block's threads take at once.
TEST(cut_for_all_blocks) {
  const Regions regions(2, size_t{1} << 20);
  const auto pieces = [&](const char* algorithm, size_t count) {
    Rank zero({find_algorithm(Collective::all_reduce, algorithm), 2, count}, 0, regions);
    zero.engine.run(zero.tensors.call, nullptr);
    launches.clear();
    return last_args.pieces;
  };
  CHECK_EQ(pieces("one_shot", 0), 1u);
  CHECK_EQ(pieces("one_shot", 1024), 1u);
  CHECK_EQ(pieces("one_shot", 1028), 2u);
  CHECK_EQ(pieces("one_shot", 10000), 2u);  // 40 KB, with room for 64 in a staging buffer
  CHECK_EQ(pieces("two_shot", 10000), 2u);
  CHECK_EQ(pieces("one_shot", 100000), 7u);
}

/// `auto` goes by the rules that the group was given.
TEST(given_rules) {
  const Regions regions(1, size_t{24} << 10);
  Tensors tensors({find_algorithm(Collective::all_reduce, "ring"), 1, 1000}, 0);
  tensors.call.algorithm = nullptr;
  const auto chosen = [&](const char* table) {
    GpuPullExecutor::Setup setup = regions.setup(0);
    setup.selector = Selector(table, "a test");
    GpuPullExecutor engine(host_device(), setup);
    engine.run(tensors.call, nullptr);
    launches.clear();
    return engine.last_call();
  };
  CHECK_HAS(chosen(""), "(one_shot, ");
  CHECK_HAS(chosen("all_reduce nccl ring\nall_reduce staged ring"), "(one_shot, ");
  CHECK_HAS(chosen("all_reduce peers butterfly"), "(butterfly, ");
}

/// What was aborted ends, and says why.
TEST(aborted) {
  const Case c{find_algorithm(Collective::all_reduce, "ring"), 2, 1000};
  const Regions regions(2, size_t{24} << 10);
  Rank zero(c, 0, regions);
  zero.engine.run(zero.tensors.call, nullptr);
  zero.engine.abort(ErrorKind::peer_lost, "enough");
  execute();
  CHECK_EQ(CHECK_THROWS(PeerLost, zero.engine.check("a call")), "enough");
  CHECK_THROWS(PeerLost, zero.engine.run(zero.tensors.call, nullptr));
}

TEST(refusals) {
  Case c{find_algorithm(Collective::all_reduce, "ring"), 3, 1000};
  const Regions regions(3, 1024);
  Rank rank(c, 0, regions);
  CHECK_HAS(CHECK_THROWS(InvalidUsage, rank.engine.run(rank.tensors.call, nullptr)), "regions of at least");
  GpuPullExecutor::Setup crowded = regions.setup(0);
  crowded.world = cuda::kMostRanks + 1;
  CHECK_THROWS(InvalidUsage, GpuPullExecutor(host_device(), crowded));
  GpuPullExecutor::Setup narrow = regions.setup(0);
  narrow.blocks = 100;
  CHECK_THROWS(InvalidUsage, GpuPullExecutor(host_device(), narrow));
  CHECK(launches.empty());
}

}  // namespace
