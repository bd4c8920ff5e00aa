// The GPU's kernels on peers' memory compiled for the host, with a host thread for each block: the same plans, address
// arithmetic, waits and publications. Every algorithm, staged and in place, in and out of place; small all-reduces whose
// words carry their flags (cuda/low_latency.h); all-to-alls of blocks of all lengths (cuda/all_to_all.h). Under
// ThreadSanitizer a missing wait is a data race. Some with a host thread for each thread of a block: there a missing
// barrier is one.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <memory>
#include <thread>

#include "base/error.h"
#include "check.h"
#include "collective_cases.h"
#include "few_algorithms.h"
#include "pull_ranks.h"
#include "uneven_blocks.h"

using namespace ringlet;
using namespace collective_cases;
using namespace pull_ranks;
using namespace uneven_blocks;
using namespace std::chrono_literals;

namespace {

const Algorithm* all_reduce(const char* name) { return find_algorithm(Collective::all_reduce, name); }

/// With a host thread for each thread of a block.
struct InTeams {
  explicit InTeams(bool teams = true) { in_teams = teams; }
  ~InTeams() { in_teams = false; }
};

/// Which ranks' tensors are in their heaps.
enum class Registered { none, some, all };

std::vector<bool> in_heaps(Registered registered, int world) {
  std::vector<bool> ranks;
  for (int q = 0; q < world; ++q) {
    ranks.push_back(registered == Registered::all || (registered == Registered::some && q % 2 == 0));
  }
  return ranks;
}

/// Pieces of at most some hundred elements, so several for each block.
void run_case(const Case& c, Registered registered, int calls = 1) {
  World world(c.world, size_t{24} << 10, in_heaps(registered, c.world));
  AllTensors tensors(c);
  for (int i = 0; i < calls; ++i) {
    for (auto& one : tensors.ranks) {
      world[one->rank].run(one->call, nullptr);
      // The input is the caller's again at once.
      launches[one->rank].push_back([&one = *one] {
        one.read_output();
        one.write_input();
      });
    }
  }
  execute();
  world.check();
  const char* kinds[] = {" staged", " staged by some", " registered"};
  tensors.check(kinds[static_cast<int>(registered)]);
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
            if (has_place(c) && !is_left_out(number, 5)) run_case(c, registered, /*calls=*/2);
          }
        }
      }
    }
  }
}

TEST(teams) {
  const InTeams teams;
  for (const Algorithm& algorithm : algorithms()) {
    if (!is_tried(algorithm, 3)) continue;
    for (const size_t count : {2, 947}) {
      if (kSanitized && count == 2) continue;  // the barriers are those of the longer one
      for (const bool in_place : {false, true}) {
        for (const Registered registered : {Registered::none, Registered::all}) {
          Case c{&algorithm, 3, algorithm.collective == Collective::barrier ? 0 : count};
          c.in_place = in_place;
          c.offset = 4 * (count % 3);
          if (has_place(c)) run_case(c, registered, /*calls=*/2);
        }
      }
    }
  }
}

TEST(every_dtype_and_operation) {
  for (const char* name : {"ring", "two_shot"}) {
    for (int d = 0; d < kDTypes; ++d) {
      for (int o = 0; o < kReduceOps; ++o) {
        Case c{all_reduce(name), 3, 1237, static_cast<DType>(d), static_cast<ReduceOp>(o)};
        if (!supports(c.dtype, c.op)) continue;
        c.in_place = (d + o) % 2 == 0;
        c.offset = element_size(c.dtype);
        for (const Registered registered : {Registered::none, Registered::all}) run_case(c, registered);
      }
    }
  }
}

/// Calls of the three kinds of kernels: all-reduces by a plan and by words with flags, and all-to-alls.
enum class Kind { plan, low_latency, exchange };

World world_of(Kind kind, int size) {
  const size_t region = kind == Kind::low_latency ? size_t{5} << 20 : size_t{24} << 10;
  return World(size, region, {}, [&](GpuPullExecutor::Setup& setup) {
    setup.blocks = kind == Kind::low_latency ? 4 : kBlocks;
    setup.low_latency = kind == Kind::low_latency;
  });
}
Case case_of(Kind kind, int world) {
  if (kind == Kind::exchange) return {find_algorithm(Collective::all_to_all, "pairwise"), world, 1000};
  return {all_reduce(kind == Kind::plan ? "ring" : "one_shot"), world, 1000,
          kind == Kind::plan ? DType::int32 : DType::float32};
}

/// How long a rank waits in vain, in processor time: longer than its peer takes to look at its call on a busy machine.
constexpr std::chrono::milliseconds kUntilPeerCame = kSanitized ? 500ms : 200ms;

/// A rank that does not come: the others' blocks end within their time, say who was missing, and later ones end at
/// once.
TEST_EACH(a_missing_rank, Kind kind, Kind::plan, Kind::low_latency, Kind::exchange) {
  World world = world_of(kind, 3);
  AllTensors tensors(case_of(kind, 3));
  for (const int q : {0, 1}) {
    tensors[q].call.timeout = 20ms;
    world[q].run(tensors[q].call, nullptr);
  }
  execute();
  CHECK_HAS(CHECK_THROWS(Timeout, world[0].check(world[0].last_call())),
            "rank 0 of 3 in or before " + describe(tensors[0].call), "for rank 2");
  CHECK_THROWS(Timeout, world[1].check("a call"));
  tensors[0].call.timeout = 24h;
  world[0].run(tensors[0].call, nullptr);
  execute();
  CHECK_THROWS(Timeout, world[0].check("a call"));
}

/// Ranks that call different things: both are named on every rank that waits for the other, and nothing is waited out,
/// nor written.
void other_calls(World world, const Case& of_zero, const Case& of_one) {
  AllTensors tensors(of_zero);
  tensors.ranks[1] = std::make_unique<Tensors>(of_one, 1);
  for (const int q : {0, 1}) {
    tensors[q].call.sequence = 7;
    tensors[q].write_input();
    world[q].run(tensors[q].call, nullptr);
  }
  tensors[1].read_output();
  const Bytes before = tensors[1].seen;
  execute();
  for (const int q : {0, 1}) {
    CHECK_HAS(CHECK_THROWS(InvalidUsage, world[q].check("a call")), "calls do not match", describe(tensors[0].call),
              describe(tensors[1].call));
  }
  tensors[1].read_output();
  CHECK(tensors[1].seen == before);
}

TEST(other_calls_are_named) {
  const Case c{all_reduce("ring"), 2, 1000};
  for (const Case& other : {Case{c.algorithm, 2, 1000, DType::int32, ReduceOp::max}, Case{c.algorithm, 2, 999},
                            Case{c.algorithm, 2, 1000, DType::float32}, Case{all_reduce("butterfly"), 2, 1000}}) {
    for (const bool registered : {false, true}) {
      other_calls(World(2, size_t{24} << 10, {registered, registered}), c, other);
    }
  }
  Case small = case_of(Kind::low_latency, 2), larger = small;
  larger.count = 5000;
  other_calls(world_of(Kind::low_latency, 2), small, larger);
}

/// One call goes by words with flags, or is an all-to-all, and the other's by a plan: who goes by the plan hears what the
/// other one calls, and names both.
TEST_EACH(a_call_of_another_kind, Kind kind, Kind::low_latency, Kind::exchange) {
  World world = world_of(kind, 2);
  AllTensors tensors(case_of(kind, 2));
  const Case by_plan{kind == Kind::exchange ? find_algorithm(Collective::all_gather, "ring") : all_reduce("one_shot"),
                     2, 1000};
  tensors.ranks[1] = std::make_unique<Tensors>(by_plan, 1);
  const int hears = kind == Kind::exchange ? 0 : 1;
  tensors[1 - hears].call.timeout = kUntilPeerCame;  // in a group its host hears of it before
  for (const int q : {0, 1}) world[q].run(tensors[q].call, nullptr);
  execute();
  CHECK_HAS(CHECK_THROWS(InvalidUsage, world[hears].check("a call")), "calls do not match", describe(tensors[0].call),
            describe(tensors[1].call));
  CHECK_THROWS(Timeout, world[1 - hears].check("a call"));
}

/// The root gives up while a peer reads its tensor, and has it back: the peer's call is no success, though all has
/// come.
TEST(a_root_that_gives_up) {
  const Case c{find_algorithm(Collective::broadcast, "tree"), 2, 1000};
  World world(2, size_t{24} << 10, {true, true});
  AllTensors tensors(c);
  const int root = c.root(), peer = 1 - root;
  tensors[root].call.timeout = 20ms;
  for (const int q : {root, peer}) world[q].run(tensors[q].call, nullptr);
  std::atomic<bool> let_go{false};
  launches[root].push_back([&] { let_go = true; });
  before_split = [&](const cuda::PullShared& shared) {
    while (shared.works[0].dst == tensors[peer].call.output && !let_go) std::this_thread::yield();
  };
  execute();
  before_split = nullptr;
  CHECK_THROWS(Timeout, world[root].check("a call"));
  CHECK_HAS(CHECK_THROWS(Timeout, world[peer].check("a call")), "rank " + std::to_string(root) + " gave its call up");
}

/// Whole messages are read where they lie if all ranks' can be, and go through staging buffers if one rank's cannot.
TEST(read_in_place) {
  const Case c{all_reduce("one_shot"), 3, 1000};
  for (const bool all : {true, false}) {
    World world(3, size_t{24} << 10, {true, all, true});
    AllTensors tensors(c);
    tensors.enqueue(world);
    execute();
    for (int q = 0; q < 3; ++q) CHECK_EQ(world.regions.staged(q), !all);
  }
}

/// Tensors that begin anywhere: what is staged lies as far past a pack's start as its rank's tensor, so packs meet packs
/// where all ranks' tensors lie alike. Where they do not, elements move one by one, and the result is the same.
TEST(unaligned_tensors) {
  for (const bool alike : {true, false}) {
    for (const char* name : {"one_shot", "two_shot", "ring"}) {
      Case c{all_reduce(name), 3, 4096};
      World world(c.world, size_t{256} << 10);
      AllTensors tensors(c);
      tensors.ranks.clear();
      for (int q = 0; q < c.world; ++q) {
        c.offset = alike ? 4 : 4 * static_cast<size_t>(q);
        tensors.add(c);
      }
      std::atomic<int> works{0}, one_by_one{0};
      before_split = [&](const cuda::PullShared& shared) {
        ++works;
        one_by_one += shared.works[0].packs == 0;
      };
      tensors.enqueue(world);
      execute();
      before_split = nullptr;
      CHECK(works > 0 && (one_by_one == 0) == alike);
      tensors.check(" unaligned");
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
    Tensors tensors({all_reduce("one_shot"), 2, count}, 0);
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
  World world(kWorld, size_t{64} << 10);
  std::vector<AllTensors> all;
  for (int turn = 0; turn < 4; ++turn) {
    for (const Algorithm& algorithm : algorithms()) {
      const size_t count = std::vector<size_t>{1, 5000, 30, 1237}[(all.size() + static_cast<size_t>(turn)) % 4];
      all.emplace_back(Case{&algorithm, kWorld, algorithm.collective == Collective::barrier ? 0 : count});
      all.back().enqueue(world);
    }
  }
  execute();
  for (const AllTensors& each : all) each.check(" after others");
}

/// A message is cut for all blocks to have work, down to what a block's threads take at once.
TEST(cut_for_all_blocks) {
  World world(2, size_t{1} << 20);
  const auto pieces = [&](const char* algorithm, size_t count) {
    Tensors zero({all_reduce(algorithm), 2, count}, 0);
    world[0].run(zero.call, nullptr);
    launches.clear();
    return last_args.staged.pieces;
  };
  CHECK_EQ(pieces("one_shot", 0), 1u);
  CHECK_EQ(pieces("one_shot", 1024), 1u);
  CHECK_EQ(pieces("one_shot", 1028), 2u);
  CHECK_EQ(pieces("one_shot", 10000), 2u);  // 40 KB, with room for 64 in a staging buffer
  CHECK_EQ(pieces("two_shot", 10000), 2u);
  CHECK_EQ(pieces("one_shot", 100000), 7u);
}

/// What is read in place is cut as if there were no staging buffers, although no rank knows yet whether all others can.
TEST(cut_in_place) {
  World world(2, size_t{256} << 10, {true, true});
  AllTensors tensors({all_reduce("two_shot"), 2, 100000});
  tensors.enqueue(world);
  CHECK_EQ(last_args.staged.pieces, 13u);
  CHECK_EQ(last_args.in_place.pieces, 4u);
  execute();
  CHECK(!world.regions.staged(0));
  tensors.check(" cut in place");
}

/// `auto` goes by the rules that the group was given.
TEST(given_rules) {
  const Regions regions(1, size_t{24} << 10);
  Tensors tensors({all_reduce("ring"), 1, 1000}, 0);
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
  World world(2);
  AllTensors tensors(case_of(Kind::plan, 2));
  world[0].run(tensors[0].call, nullptr);
  world[0].abort(ErrorKind::peer_lost, "enough");
  execute();
  CHECK_EQ(CHECK_THROWS(PeerLost, world[0].check("a call")), "enough");
  CHECK_THROWS(PeerLost, world[0].run(tensors[0].call, nullptr));
}

TEST(refusals) {
  World small(3, 1024);
  const AllTensors tensors(case_of(Kind::plan, 3));
  CHECK_HAS(CHECK_THROWS(InvalidUsage, small[0].run(tensors.ranks[0]->call, nullptr)), "regions of at least");
  GpuPullExecutor::Setup crowded = small.regions.setup(0);
  crowded.world = cuda::kMostRanks + 1;
  CHECK_THROWS(InvalidUsage, GpuPullExecutor(host_device(), crowded));
  GpuPullExecutor::Setup narrow = small.regions.setup(0);
  narrow.blocks = 100;
  CHECK_THROWS(InvalidUsage, GpuPullExecutor(host_device(), narrow));
  World tiny(2, 768);
  Tensors exchanged(case_of(Kind::exchange, 2), 0);
  CHECK_HAS(CHECK_THROWS(InvalidUsage, tiny[0].run(exchanged.call, nullptr)), "regions of 768 bytes have no room");
  CHECK(launches.empty());
}

// ---- small all-reduces whose words carry their flags

/// All counts, dtypes and offsets, in and out of place.
TEST(words_with_flags) {
  for (const int size : {1, 2, 3, 8, 9}) {
    if (kSanitized && size != 3) continue;
    World world = world_of(Kind::low_latency, size);
    for (const DType dtype : {DType::float32, DType::float16, DType::bfloat16}) {
      for (const size_t count : {1, 2, 3, 1023, 2049, 6001}) {
        for (const bool alike : {true, false}) {
          Case c{all_reduce("one_shot"), size, count, dtype, count % 2 == 0 ? ReduceOp::avg : ReduceOp::sum};
          if (c.op == ReduceOp::avg && (size & (size - 1)) != 0) c.op = ReduceOp::sum;  // exact in any order
          c.in_place = count % 3 == 0;
          c.offset = element_size(dtype) * (count % 5);
          AllTensors tensors(c);
          for (int q = 0; !alike && q < size; ++q) {
            Case own = c;
            own.offset += element_size(dtype) * static_cast<size_t>(q);
            tensors.ranks[static_cast<size_t>(q)] = std::make_unique<Tensors>(own, q);
            tensors[q].write_input();
          }
          const int before = low_launches;
          tensors.enqueue(world);
          execute();
          CHECK_EQ(low_launches - before, size);
          world.check();
          tensors.check(alike ? " alike" : " not alike");
        }
      }
    }
  }
}

/// What is under way of one call stays until it is read, whatever comes after it; other kernels come between.
TEST_EACH(words_with_flags_one_after_another, bool teams, false, true) {
  const InTeams in(teams);
  World world = world_of(Kind::low_latency, 3);
  std::vector<AllTensors> all;
  for (int turn = 0; turn < 2; ++turn) {
    for (const size_t count : {6000, 1, 5000, 30, 6000, 2, 2, 1, 4000, 7}) {
      std::vector<Case> cases{
          {all_reduce("one_shot"), 3, teams ? std::min<size_t>(count, 700) : count, DType::float32}};
      if (count % 4 == 0) cases.push_back({all_reduce("one_shot"), 3, count / 4, DType::int32});
      if (count == 1) cases.push_back({all_reduce("ring"), 3, 50, DType::int32});
      for (const Case& c : cases) all.emplace_back(c).enqueue(world);
    }
  }
  execute();
  for (const AllTensors& each : all) each.check(" after others");
}

/// A rank that waits for long tells what it calls, but not in place of a call that a late rank has still to compare: a
/// root of broadcasts is two calls ahead before others begin.
TEST(words_with_flags_wait_for_a_late_rank) {
  World world = world_of(Kind::low_latency, 2);
  Case broadcast{find_algorithm(Collective::broadcast, "star"), 2, 100, DType::float32};
  broadcast.seed = 1;  // the root's rank
  launches[0].push_back([] { std::this_thread::sleep_for(std::chrono::milliseconds(30)); });
  std::vector<AllTensors> all;
  for (const Case& c : {broadcast, broadcast, Case{all_reduce("one_shot"), 2, 100, DType::float32}, broadcast}) {
    all.emplace_back(c).enqueue(world);
  }
  execute();
  world.check();
  for (const AllTensors& each : all) each.check(" with a late rank");
}

/// Other dtypes, operations, algorithms and sizes go by a plan.
TEST(what_words_with_flags_serve) {
  World world = world_of(Kind::low_latency, 2);
  const auto low = [&](const Case& c) {
    const int before = low_launches;
    AllTensors tensors(c);
    tensors.enqueue(world);
    launches.clear();
    return low_launches - before == 2;
  };
  CHECK(low({all_reduce("one_shot"), 2, 16384, DType::float32}));
  CHECK(!low({all_reduce("one_shot"), 2, 16385, DType::float32}));  // more than 64 KiB
  CHECK(!low({all_reduce("one_shot"), 2, 0, DType::float32}));
  CHECK(!low({all_reduce("one_shot"), 2, 10, DType::float64}));
  CHECK(!low({all_reduce("one_shot"), 2, 10, DType::float32, ReduceOp::max}));
  CHECK(!low({all_reduce("one_shot"), 2, 10, DType::float32, ReduceOp::premul_sum}));
  CHECK(!low({all_reduce("two_shot"), 2, 10, DType::float32}));
}

// ---- all-to-alls of blocks of all lengths

struct Exchanging {
  Exchanging(size_t unit, int rank, int world) : blocks({Collective::all_to_all, unit}, rank, world) {
    call.collective = Collective::all_to_all;
    call.dtype = DType::int32;
    call.count = blocks.blocks.longest;
    call.blocks = &blocks.blocks;
    call.timeout = 60s;
  }
  UnevenRank blocks;
  Call call;
};

std::vector<std::unique_ptr<Exchanging>> exchanging(size_t unit, int world) {
  std::vector<std::unique_ptr<Exchanging>> ranks;
  for (int q = 0; q < world; ++q) ranks.push_back(std::make_unique<Exchanging>(unit, q, world));
  return ranks;
}

/// Several calls one after another; the inputs are the callers' again after each.
void exchange_thrice(World& world, size_t unit, const std::string& what) {
  const auto ranks = exchanging(unit, world.size());
  for (int i = 0; i < 3; ++i) {
    for (int q = 0; q < world.size(); ++q) {
      Exchanging& rank = *ranks[static_cast<size_t>(q)];
      world[q].run(rank.call, nullptr);
      launches[q].push_back([&given = rank.blocks.in, i] {
        for (Values& values : given) {
          for (int32_t& value : values) value += i == 0 ? 1 : i == 1 ? -1 : 0;
        }
      });
    }
  }
  execute();
  world.check();
  bool right = true;
  for (const auto& rank : ranks) right = right && rank->blocks.out == rank->blocks.wanted;
  check_report(right, __FILE__, __LINE__,
               "world " + std::to_string(world.size()) + " unit " + std::to_string(unit) + what);
}

/// Some of no length at all, some of many pieces: then others' blocks have long been over.
TEST(blocks_of_all_lengths) {
  for (const int size : {1, 2, 3, 5, 9}) {
    for (const size_t unit : {0, 1, 100, 3001}) {
      for (const Registered registered : {Registered::none, Registered::some, Registered::all}) {
        if (size > 5 && unit > 100) continue;
        World world(size, size > 5 ? size_t{64} << 10 : size_t{24} << 10, in_heaps(registered, size));
        exchange_thrice(world, unit, " registered " + std::to_string(static_cast<int>(registered)));
        for (int q = 0; registered == Registered::all && q < size; ++q) CHECK(!world.regions.staged(q));
      }
    }
  }
  const InTeams teams;
  for (const Registered registered : {Registered::none, Registered::all}) {
    World world(3, size_t{24} << 10, in_heaps(registered, 3));
    exchange_thrice(world, 300, " teams");
  }
}

/// Packs meet packs wherever the receiver's block begins: what is staged for it lies as far past a pack's start.
TEST(unaligned_blocks) {
  World world(2, size_t{256} << 10);
  const auto ranks = exchanging(500, 2);
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
  for (const int q : {0, 1}) world[q].run(ranks[static_cast<size_t>(q)]->call, nullptr);
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
    World world(2, size_t{24} << 10, {registered, registered});
    const auto ranks = exchanging(100, 2);
    Exchanging& zero = *ranks[0];
    zero.blocks.blocks.counts[3] -= 7;  // of what rank 1 sends rank 0: 500
    const std::vector<Values> before = zero.blocks.out;
    ranks[1]->call.timeout = kUntilPeerCame;
    for (const int q : {0, 1}) world[q].run(ranks[static_cast<size_t>(q)]->call, nullptr);
    execute();
    const std::string message = CHECK_THROWS(InvalidUsage, world[0].check(world[0].last_call()));
    CHECK(message.find("rank 0 of 2 in or before all_to_all #0 (pairwise, int32, ") == 0);
    CHECK_HAS(message, "rank 1 sends rank 0 500 elements, and rank 0 expects 493");
    CHECK(zero.blocks.out == before);
    CHECK_THROWS(Timeout, world[1].check("a call"));
  }
  World world(2);
  const auto ranks = exchanging(100, 2);
  ranks[0]->blocks.blocks.counts[2] += 1;
  CHECK_HAS(CHECK_THROWS(InvalidUsage, world[0].run(ranks[0]->call, nullptr)),
            "rank 0 sends itself 0 elements and expects 1");
}

/// Equal blocks in one tensor on one rank, the same as a list on another: the same call.
TEST(a_tensor_and_a_list_are_the_same_call) {
  World world(2);
  AllTensors tensors({find_algorithm(Collective::all_to_all, "pairwise"), 2, 50});
  Tensors& listed = tensors[1];
  Blocks blocks;
  for (const size_t q : {size_t{0}, size_t{1}}) {
    blocks.inputs.push_back(const_cast<std::byte*>(listed.call.input) + q * 50 * 4);
    blocks.outputs.push_back(listed.call.output + q * 50 * 4);
  }
  blocks.counts.assign(4, 50);
  blocks.longest = 50;
  listed.call.blocks = &blocks;
  tensors.enqueue(world);
  execute();
  world.check();
  tensors.check(" a tensor and a list");
}

}  // namespace
