// Structure of every registered schedule: they build, stay inside their buffer, and their messages pair up. What they
// compute is in plan_test.cc; what they cost, and what they are along hosts, is proved (tests/core/test_prove.py,
// test_topology.py).
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "schedule/registry.h"
#include "schedule/topology.h"

namespace {

using namespace ringlet;

int expected_parts(Collective collective, int world, int parts) {
  if (is_divided(collective)) return parts;
  if (collective == Collective::barrier) return 1;
  return collective == Collective::all_to_all ? 2 * world : world;
}

bool inside(int first, int count, int parts) { return first >= 0 && count >= 0 && first + count <= parts; }

using Messages = std::map<std::pair<int, int>, std::vector<int>>;  // (from, to) -> chunk counts in order

void check_step(const Step& step, const RankInfo& info, int parts, Messages& sent, Messages& received) {
  CHECK(inside(step.first, step.count, parts));
  if (step.verb == Verb::copy) {
    CHECK(inside(step.peer, step.count, parts));
    return;
  }
  CHECK(step.peer >= 0 && step.peer < info.world && step.peer != info.rank);
  if (step.verb == Verb::send) {
    sent[{info.rank, step.peer}].push_back(step.count);
  } else {
    received[{step.peer, info.rank}].push_back(step.count);
  }
}

void check_world(const Algorithm& algorithm, int world, int root) {
  Messages sent, received;
  int parts = 0;
  for (int rank = 0; rank < world; ++rank) {
    const RankInfo info{rank, world, root, nullptr};
    const Schedule schedule = schedule_of(algorithm, info);
    if (rank == 0) parts = schedule.parts;
    CHECK_EQ(schedule.parts, parts);
    CHECK_EQ(schedule.parts, expected_parts(algorithm.collective, world, schedule.parts));
    for (const Round& round : schedule.rounds) {
      CHECK(!round.steps.empty());
      for (const Step& step : round.steps) check_step(step, info, parts, sent, received);
    }
    const Chunks in = input_chunks(algorithm.collective, info, parts);
    const Chunks out = output_chunks(algorithm.collective, info, parts);
    CHECK(inside(in.first, in.count, parts) && inside(out.first, out.count, parts));
    if (world == 1 && algorithm.collective != Collective::all_to_all) CHECK_EQ(schedule.rounds.size(), 0u);
  }
  CHECK(sent == received);
}

TEST(every_algorithm_builds) {
  for (const Algorithm& algorithm : algorithms()) {
    for (int world = 1; world <= (kSanitized ? 32 : 64); ++world) {
      check_world(algorithm, world, 0);
      if (!has_root(algorithm.collective)) continue;
      for (int root = 1; root < world; root += world < 10 ? 1 : world - 2) check_world(algorithm, world, root);
    }
  }
}

using Ranks = std::vector<int>;

Ranks ranks_on(const Topology& topology, int host) {
  const auto ranks = topology.ranks_on(host);
  return {ranks.begin(), ranks.end()};
}

TEST(topology_answers) {
  const Topology topology(Ranks{7, 7, 7, -2, -2, 7, 4});
  CHECK_EQ(topology.world(), 7);
  CHECK_EQ(topology.hosts(), 3);
  CHECK_EQ(topology.fewest(), 1);
  CHECK(!topology.one_host());
  CHECK(ranks_on(topology, 0) == (Ranks{0, 1, 2, 5}) && ranks_on(topology, 1) == (Ranks{3, 4}));
  CHECK_EQ(topology.size(0), 4);
  CHECK_EQ(topology.host(4), 1);
  CHECK_EQ(topology.index_on_host(5), 3);
  CHECK_EQ(topology.index_on_host(6), 0);
  CHECK(topology.along().rank_at == (Ranks{0, 1, 2, 5, 3, 4, 6}));
  CHECK(topology.across().rank_at == (Ranks{0, 3, 6, 1, 4, 2, 5}));
  CHECK(topology.across().position_of == (Ranks{0, 3, 5, 1, 4, 6, 2}));
  CHECK(Topology(Ranks{3, 3, 3}).one_host());
}

TEST(identity_where_ranks_are_in_order) {
  const Topology block(Ranks{0, 0, 1, 1}), cyclic(Ranks{0, 1, 0, 1}), together(Ranks{0, 0, 0});
  CHECK(block.along().identity && !block.across().identity);
  CHECK(cyclic.across().identity && !cyclic.along().identity);
  CHECK(together.along().identity && together.across().identity);
}

TEST(registry_finds_by_name) {
  for (const Algorithm& algorithm : algorithms()) {
    CHECK(find_algorithm(algorithm.collective, algorithm.name) == &algorithm);
    CHECK(&algorithms()[index_of(algorithm)] == &algorithm);
    CHECK(std::string(algorithm.summary).size() > 0);
  }
  CHECK(find_algorithm(Collective::all_reduce, "tree") == nullptr);
  CHECK(find_algorithm(Collective::barrier, "ring") == nullptr);
  for (int i = 0; i < kCollectives; ++i) {
    const auto collective = static_cast<Collective>(i);
    CHECK(parse_collective(name(collective)) == collective);
  }
  CHECK(!parse_collective("all-reduce"));
}

}  // namespace
