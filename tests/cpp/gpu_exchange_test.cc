// Point-to-point messages of GPUs, and blocks that lie apart or differ in length, in many orders of events
// (recording_nccl.h).
#include <algorithm>
#include <thread>
#include <vector>

#include "base/deadline.h"
#include "check.h"
#include "fake_rank.h"
#include "uneven_blocks.h"

using namespace fake_rank;
using namespace uneven_blocks;

namespace {

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

}  // namespace
