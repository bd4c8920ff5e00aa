// The GPU's message engine on a NCCL and a device of the host (recording_nccl.h): every algorithm, dtype and operation,
// in and out of place, whole and in segments, under many orders of events; messages, and blocks that lie apart or differ
// in length; and what it says where something refuses.
#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "check.h"
#include "collective_cases.h"
#include "gpu/gpu_message_executor.h"
#include "recording_nccl.h"
#include "uneven_blocks.h"

using namespace collective_cases;
using namespace uneven_blocks;

namespace {

/// One rank's tensors and everything that serves it.
struct Rank {
  Rank(FakeMachine& machine, const Case& c, int rank) : tensors(c, rank), call(tensors.call) {
    machine.rank = rank;
    const NcclCommunicator::Setup setup{.rank = rank, .world = c.world};
    communicator =
        std::make_unique<NcclCommunicator>(FakeMachine::nccl(), setup, Deadline::after(std::chrono::seconds(60)));
    engine = std::make_unique<GpuMessageExecutor>(
        *communicator, FakeMachine::device(),
        GpuMessageExecutor::Limits{c.scratch_bytes, /*least=*/1024, size_t{1} << 20});
    stream = machine.add_stream();
  }

  /// As a program does: its stream makes the input, then the call, then reads the output and writes over the input.
  void enqueue_call() {
    stream->items.push_back({.act = [this] { tensors.write_input(); }});
    engine->run(call, stream);
    stream->items.push_back({.act = [this] {
      tensors.read_output();
      tensors.spoil_input();
    }});
  }

  Tensors tensors;
  Call& call;
  std::unique_ptr<NcclCommunicator> communicator;
  std::unique_ptr<GpuMessageExecutor> engine;
  FakeStream* stream = nullptr;
};

Case small_case() { return {find_algorithm(Collective::all_reduce, "ring"), 2, 1000}; }

/// Runs the case and returns how often arithmetic ran beside a transfer. `chosen`: what `auto` is to choose, and does
/// then.
int run_case(const Case& c, int calls = 1, const char* chosen = nullptr) {
  FakeMachine machine;
  std::vector<std::unique_ptr<Rank>> ranks;
  const std::vector<Bytes> inputs = all_numbers(c);
  const Bytes total = total_of(c, inputs);
  for (int q = 0; q < c.world; ++q) {
    ranks.push_back(std::make_unique<Rank>(machine, c, q));
    if (chosen != nullptr) ranks.back()->call.algorithm = nullptr;
  }
  for (int i = 0; i < calls; ++i) {
    for (auto& rank : ranks) {
      machine.rank = rank->communicator->rank();
      rank->enqueue_call();
      if (chosen != nullptr) CHECK_HAS(rank->engine->last_call(), chosen);
    }
  }
  bool ok = machine.execute(c.seed);
  for (int q = 0; q < c.world && ok; ++q) {
    Rank& rank = *ranks[static_cast<size_t>(q)];
    ok = rank.tensors.good(expected(c, q, inputs, total));
  }
  ranks.clear();
  std::string what = describe_case(c);
  for (const std::string& violation : machine.violations) what += "; " + violation;
  check_report(ok && machine.violations.empty() && machine.allocated == 0, __FILE__, __LINE__, what);
  // A block of a reduce-scatter's input need not lie as its output does; elsewhere slots follow the tensors.
  if (is_divided(c.algorithm->collective)) CHECK_EQ(machine.one_by_one, 0);
  return machine.overlaps;
}

TEST(every_algorithm) {
  int number = 0;
  for (const Algorithm& algorithm : algorithms()) {
    for (const int world : {1, 2, 3, 4, 5}) {
      if (kSanitized && world == 4) continue;
      for (const size_t count : {0, 1, world - 1, world + 1, 12357}) {
        for (const bool in_place : {false, true}) {
          // Whole, and in segments of a few hundred elements.
          for (const size_t scratch : {size_t{1} << 20, size_t{32} << 10}) {
            Case c{&algorithm, world, algorithm.collective == Collective::barrier ? 0 : count};
            c.in_place = in_place;
            c.scratch_bytes = scratch;
            c.seed = static_cast<unsigned>(count + scratch) % 11;
            c.offset = 4 * (count % 3);
            if (has_place(c) && !is_left_out(number, 5)) run_case(c);
          }
        }
      }
    }
  }
}

TEST(automatic) {
  run_case({find_algorithm(Collective::all_reduce, "two_shot"), 3, 25000}, /*calls=*/1, "(two_shot, ");
}

TEST(every_dtype_and_operation) {
  for (const char* name : {"ring", "butterfly", "two_shot", "star"}) {
    const Algorithm* algorithm = find_algorithm(Collective::all_reduce, name);
    for (int d = 0; d < kDTypes; ++d) {
      for (int o = 0; o < kReduceOps; ++o) {
        for (const int world : {1, 2, 3, 5}) {
          Case c{algorithm, world, 1237, static_cast<DType>(d), static_cast<ReduceOp>(o)};
          if (!supports(c.dtype, c.op)) continue;
          c.in_place = (d + o + world) % 2 == 0;
          c.scratch_bytes = size_t{16} << 10;
          c.seed = static_cast<unsigned>(d + o);
          c.offset = element_size(c.dtype);
          run_case(c);
        }
      }
    }
  }
}

/// Orders of events that break what lacks a wait, with one call after another on the same stream.
TEST(many_orders) {
  for (const Algorithm& algorithm : algorithms()) {
    if (algorithm.collective == Collective::barrier) continue;
    for (unsigned seed = 0; seed < (few_cases() ? 10 : 40); ++seed) {
      Case c{&algorithm, 3 + static_cast<int>(seed % 3), 999};
      c.scratch_bytes = size_t{8} << 10;
      c.seed = seed;
      run_case(c, /*calls=*/1 + static_cast<int>(seed % 2));
    }
  }
}

/// Values whose sums depend on the order: several at once are added in rank order, as on the host.
TEST(rank_order) {
  const Case c{find_algorithm(Collective::all_reduce, "two_shot"), 5, 999, DType::float32};
  FakeMachine machine;
  std::mt19937_64 random(5);
  std::vector<std::unique_ptr<Rank>> ranks;
  std::vector<Bytes> inputs;
  for (int q = 0; q < c.world; ++q) {
    ranks.push_back(std::make_unique<Rank>(machine, c, q));
    inputs.push_back(ranks.back()->tensors.given = random_input(c.dtype, c.count, /*tame=*/true, random));
  }
  for (auto& rank : ranks) rank->enqueue_call();
  CHECK(machine.execute(9));
  const Bytes wanted = reference(c.dtype, ReduceOp::sum, inputs, {});
  for (auto& rank : ranks) CHECK(rank->tensors.good(wanted));
  std::reverse(inputs.begin(), inputs.end());
  CHECK(wanted != reference(c.dtype, ReduceOp::sum, inputs, {}));
}

TEST(segments_overlap) {
  for (const char* name : {"ring", "halving_doubling", "two_shot"}) {
    Case c{find_algorithm(Collective::all_reduce, name), 4, 12357};
    c.scratch_bytes = size_t{16} << 10;
    CHECK(run_case(c) > 0);
    c.count = 499;  // chunks of one segment: nothing to overlap with
    CHECK_EQ(run_case(c), 0);
  }
}

/// A schedule of which two rounds of rank 1 meet one of rank 0: no common steps, so segments go one after another.
Schedule lopsided(const RankInfo& info) {
  Schedule schedule(/*parts=*/2);
  if (info.rank == 0) schedule.round().send(1, {0, 1}).send(1, {1, 1});
  if (info.rank == 1) {
    schedule.round().recv(0, {0, 1});
    schedule.round().recv(0, {1, 1});
  }
  return schedule;
}

/// It receives over what it sends.
Schedule overwriting(const RankInfo& info) {
  Schedule schedule(/*parts=*/1);
  schedule.round().send(1 - info.rank, {0, 1}).recv(1 - info.rank, {0, 1});
  return schedule;
}

TEST(unusual_schedules) {
  const Algorithm swap{"overwriting", Collective::all_reduce, overwriting, ""};
  CHECK_HAS(CHECK_THROWS(InvalidUsage, make_gpu_plan(swap, {0, 2, 0}, false)),
            "round 0 rank 0 overwrites a chunk that it reads");
  const Algorithm algorithm{"lopsided", Collective::broadcast, lopsided, ""};
  CHECK(!make_gpu_plan(algorithm, {0, 2, 0}, false).in_step);
  // A rank of two trees takes from children at different heights in one round: it has no common steps with them.
  for (const Algorithm& known : algorithms()) {
    CHECK_EQ(make_gpu_plan(known, {1, 5, 0}, false).in_step, std::string(known.name) != "double_binary_tree");
  }
}

/// Refused before anything moves: the engine serves the next call.
TEST(refusals) {
  FakeMachine machine;
  Case c = small_case();
  Rank rank(machine, c, 0);
  machine.rank = 1;
  GpuMessageExecutor tiny(*rank.communicator, FakeMachine::device(), {256, 512, 512});
  CHECK_HAS(CHECK_THROWS(InvalidUsage, tiny.run(rank.call, rank.stream)), "bytes of scratch", "budget is 256");
  CHECK(machine.messages.empty() && machine.violations.empty());
  rank.engine->run(rank.call, rank.stream);
  CHECK(!machine.messages.empty());
}

/// Whatever fails on the way: the communicator is aborted once, the error names the call, and later calls say it again.
TEST(failures) {
  {
    FakeMachine machine;
    Rank rank(machine, small_case(), 0);
    machine.state = kNcclRemoteError;
    CHECK_HAS(CHECK_THROWS(PeerLost, rank.engine->run(rank.call, rank.stream)), "remote process exited",
              "said by the fake");
    CHECK_THROWS(PeerLost, rank.engine->run(rank.call, rank.stream));
    CHECK(machine.communicators[0]->ended && machine.violations.empty());
  }
  {
    FakeMachine machine;
    Rank rank(machine, small_case(), 0);
    machine.device_refuses = 1;
    CHECK_HAS(CHECK_THROWS(DeviceError, rank.engine->run(rank.call, rank.stream)),
              "all_reduce #0 (ring, sum, int32, 1000 elements)", "rank 0", "said by the fake device");
    CHECK(machine.communicators[0]->ended && machine.violations.empty());
    CHECK_HAS(CHECK_THROWS(DeviceError, rank.engine->run(rank.call, rank.stream)), "aborted before");
  }
}

/// Messages given together move together, whatever their order; empty ones do not move at all.
TEST(exchanges) {
  for (unsigned seed = 0; seed < 20; ++seed) {
    FakeMachine machine;
    std::vector<std::unique_ptr<Rank>> ranks;
    std::vector<Bytes> given, got;
    for (int q = 0; q < 2; ++q) {
      ranks.push_back(std::make_unique<Rank>(machine, small_case(), q));
      given.emplace_back(1000, std::byte(q + 1));
      got.emplace_back(1000);
    }
    for (int q = 0; q < 2; ++q) {
      machine.rank = q;
      const auto mine = static_cast<size_t>(q);
      const auto message = [&](bool sending, size_t count, Bytes& all, size_t from) {
        return Message{1 - q, sending, DType::uint8, count, all.data() + from, {}};
      };
      const std::vector<Message> messages = {message(true, 600, given[mine], 0),   message(false, 600, got[mine], 400),
                                             message(true, 0, given[mine], 0),     message(false, 0, got[mine], 0),
                                             message(true, 400, given[mine], 600), message(false, 400, got[mine], 0)};
      ranks[mine]->engine->exchange(messages, std::chrono::seconds(60), ranks[mine]->stream);
      CHECK_HAS(ranks[mine]->engine->last_call(), "send to rank ", "(600 bytes), recv from rank ");
    }
    CHECK(machine.execute(seed));
    CHECK(got[0] == given[1] && got[1] == given[0] && machine.violations.empty());
  }
}

/// What NCCL does not take in time ends the communicator, and names the message.
TEST(late_exchanges) {
  FakeMachine machine;
  Rank rank(machine, small_case(), 0);
  machine.connects = false;
  const std::vector<Message> one = {{1, true, DType::uint8, 1, rank.tensors.output.data, {}}};
  CHECK_HAS(CHECK_THROWS(Timeout, rank.engine->exchange(one, std::chrono::milliseconds(1), rank.stream)),
            "send to rank 1 (1 bytes) on rank 0");
  CHECK_THROWS(Timeout, rank.engine->exchange(one, std::chrono::milliseconds(1), rank.stream));
  CHECK(!machine.communicators[0]->ended);  // while the call is inside NCCL
  machine.connects = true;
  const Deadline soon = Deadline::after(std::chrono::seconds(20));
  while (!machine.communicators[0]->ended && !soon.passed()) std::this_thread::yield();
  CHECK(machine.communicators[0]->ended && machine.violations.empty());
}

/// Of an all-to-all each rank knows the lengths of its own blocks alone.
TEST(blocks_of_all_lengths) {
  constexpr int kWorld = 3;
  for (const Algorithm& algorithm : algorithms()) {
    const Shape shape{algorithm.collective};
    if (!shape.exchange() && shape.which != Collective::all_gather && shape.which != Collective::reduce_scatter)
      continue;
    for (unsigned seed = 0; seed < 10; ++seed) {
      FakeMachine machine;
      const Case c{&algorithm, kWorld, 1, DType::int32, ReduceOp::sum, false, size_t{8} << 10};
      std::vector<std::unique_ptr<Rank>> ranks;
      std::vector<std::unique_ptr<UnevenRank>> uneven;
      for (int q = 0; q < kWorld; ++q) {
        ranks.push_back(std::make_unique<Rank>(machine, c, q));
        uneven.push_back(std::make_unique<UnevenRank>(shape, q, kWorld));
        Call call = ranks.back()->call;
        call.count = uneven.back()->blocks.longest;
        call.input = call.output = nullptr;
        call.blocks = &uneven.back()->blocks;
        machine.rank = q;
        ranks.back()->engine->run(call, ranks.back()->stream);
      }
      bool right = machine.execute(seed) && machine.violations.empty();
      for (const auto& rank : uneven) right = right && rank->out == rank->wanted;
      check_report(right, __FILE__, __LINE__, std::string(name(shape.which)) + " " + algorithm.name);
    }
  }
}

/// NCCL connects peers within a deadline, or the communicator is ended, once the call that is inside has returned.
TEST(deadlines) {
  FakeMachine machine;
  Rank rank(machine, small_case(), 0);
  machine.connects = false;
  const NcclCommunicator::Setup setup{.rank = 1, .world = 2};
  CHECK_HAS(CHECK_THROWS(Timeout,
                         NcclCommunicator(FakeMachine::nccl(), setup, Deadline::after(std::chrono::milliseconds(1)))),
            "ncclCommInitRankConfig of rank 1 of 2", "deadline");
  rank.call.timeout = std::chrono::milliseconds(1);
  CHECK_HAS(CHECK_THROWS(Timeout, rank.engine->run(rank.call, rank.stream)), "ncclGroupEnd of rank 0", "all_reduce #0");
  CHECK_THROWS(Timeout, rank.engine->run(rank.call, rank.stream));
  const auto both_ended = [&] { return machine.communicators[0]->ended && machine.communicators[1]->ended; };
  CHECK(!machine.communicators[0]->ended && !machine.communicators[1]->ended);
  machine.connects = true;
  const Deadline soon = Deadline::after(std::chrono::seconds(20));
  while (!both_ended() && !soon.passed()) std::this_thread::yield();
  CHECK(both_ended() && machine.violations.empty());
}

/// The fake itself sees what it should: a test whose fake accepts everything proves nothing.
TEST(the_fake_sees) {
  FakeMachine machine;
  const NcclApi& nccl = FakeMachine::nccl();
  NcclConfig config;
  NcclComm comm = nullptr;
  nccl.comm_init_rank_config(&comm, 2, {}, 0, &config);
  FakeStream* stream = machine.add_stream();
  std::byte memory[64]{};
  CHECK(nccl.send(memory, 8, kNcclUint8, 1, comm, stream) != kNcclSuccess);
  nccl.group_start();
  nccl.send(memory, 0, kNcclUint8, 1, comm, stream);
  nccl.send(memory, 8, kNcclUint8, 1, comm, stream);
  nccl.recv(memory + 4, 8, kNcclUint8, 1, comm, stream);
  nccl.send(memory, 8, kNcclUint8, 2, comm, stream);
  nccl.group_end();
  nccl.comm_abort(comm);
  nccl.comm_abort(comm);
  std::string all;
  for (const std::string& violation : machine.violations) all += violation + "\n";
  CHECK_HAS(all, "outside a group", "an empty message", "overlap", "no such peer", "after its end");
  CHECK(!machine.execute(1));  // nobody receives
}

TEST(opening) {
  setenv("RINGLET_NCCL_LIBRARY", "/nowhere/libnccl.so.2", 1);
  CHECK_EQ(nccl_candidates().size(), size_t{1});
  CHECK_HAS(CHECK_THROWS(DeviceError, nccl_api()), "no NCCL", "/nowhere/libnccl.so.2", "RINGLET_NCCL_LIBRARY");
  unsetenv("RINGLET_NCCL_LIBRARY");
  CHECK(nccl_candidates().size() >= 3 && nccl_candidates().front().loaded_only);
  CHECK_HAS(CHECK_THROWS(DeviceError, open_nccl({{"libm.so.6"}})), "libm.so.6 has no ncclGetVersion");
  CHECK_HAS(CHECK_THROWS(DeviceError, open_nccl({{OLD_NCCL}})), "NCCL 2.16.5", "needs 2.17.0");
  static_assert(sizeof(NcclConfig) == 40 && offsetof(NcclConfig, net_name) == 32);
}

}  // namespace
