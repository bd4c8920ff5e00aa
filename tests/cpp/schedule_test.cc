// Structure of every registered schedule along every kind of topology, and golden ones. What schedules compute is
// proved in Python (tests/core/test_prove.py); here: they build, stay inside their buffer, and their messages pair up.
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "schedule/algorithms.h"
#include "schedule/registry.h"
#include "schedule/relabel.h"
#include "schedule/topology.h"

namespace {

using namespace ringlet;

std::string text(const Schedule& schedule) {
  static constexpr const char* kVerbs[] = {"send", "recv", "reduce", "copy"};
  std::string out;
  for (const Round& round : schedule.rounds) {
    for (const Step& s : round.steps) {
      out += std::string(kVerbs[static_cast<int>(s.verb)]) + " " + std::to_string(s.peer) + " [" +
             std::to_string(s.first) + "+" + std::to_string(s.count) + "] ";
    }
    out += "| ";
  }
  return out;
}

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

void check_world(const Algorithm& algorithm, int world, int root, const Topology* topology = nullptr) {
  Messages sent, received;
  int parts = 0;
  for (int rank = 0; rank < world; ++rank) {
    const RankInfo info{rank, world, root, topology};
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
    for (int world = 1; world <= 64; ++world) {
      check_world(algorithm, world, 0);
      if (!has_root(algorithm.collective)) continue;
      for (int root = 1; root < world; root += world < 10 ? 1 : world - 2) check_world(algorithm, world, root);
    }
  }
}

/// Hosts of the ranks: block and cyclic numbering, uneven hosts, ranks of a host that lie apart.
const std::vector<std::vector<int>> kHosts = {{0, 0, 1, 1, 2, 2, 3, 3}, {0, 1, 2, 3, 0, 1, 2, 3},
                                              {7, 7, 7, -2, -2, 7, 4},  {0, 1, 1, 2, 2, 2, 0, 1, 1, 2, 1, 2, 2},
                                              {5, 4, 3, 2, 1},          {1, 1, 1, 1, 1, 0}};

TEST(every_algorithm_builds_along_every_topology) {
  for (const auto& hosts : kHosts) {
    const Topology topology(hosts);
    for (const Algorithm& algorithm : algorithms()) {
      const int roots = has_root(algorithm.collective) ? topology.world() : 1;
      for (int root = 0; root < roots; ++root) check_world(algorithm, topology.world(), root, &topology);
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

TEST(golden_relabelled) {
  // Two hosts, cyclic: the ring goes 0 2 1 3. An all-reduce's chunks stay; a reduce-scatter's go with their ranks.
  const Topology cyclic(Ranks{0, 1, 0, 1}), block(Ranks{0, 0, 1, 1});
  const auto of = [](Collective collective, const char* algorithm, int rank, const Topology& topology) {
    const RankInfo info{rank, topology.world(), 0, &topology};
    return text(schedule_of(*find_algorithm(collective, algorithm), info));
  };
  CHECK_EQ(of(Collective::all_gather, "ring", 0, cyclic),
           "send 2 [0+1] recv 3 [3+1] | send 2 [3+1] recv 3 [1+1] | send 2 [1+1] recv 3 [2+1] | ");
  CHECK_EQ(of(Collective::all_reduce, "ring", 0, cyclic),
           "send 2 [3+1] reduce 3 [2+1] | send 2 [2+1] reduce 3 [1+1] | send 2 [1+1] reduce 3 [0+1] | "
           "send 2 [0+1] recv 3 [3+1] | send 2 [3+1] recv 3 [2+1] | send 2 [2+1] recv 3 [1+1] | ");
  // Two hosts, block: the circulant goes 0 2 1 3. Blocks 2 3 of the positions are ranks 1 3: two steps on both sides.
  CHECK_EQ(of(Collective::reduce_scatter, "circulant", 0, block),
           "send 1 [1+1] send 1 [3+1] reduce 1 [0+1] reduce 1 [2+1] | send 2 [2+1] reduce 3 [0+1] | ");
  CHECK_EQ(of(Collective::reduce_scatter, "circulant", 1, block),
           "send 0 [0+1] send 0 [2+1] reduce 0 [1+1] reduce 0 [3+1] | send 3 [3+1] reduce 2 [1+1] | ");
  // The tree goes 0 2 1 3 as well, counted from its root 3: rank 1's parent is on the other host.
  const RankInfo child{1, 4, 3, &cyclic};
  CHECK_EQ(text(schedule_of(*find_algorithm(Collective::broadcast, "tree"), child)), "recv 2 [0+1] | ");
}

TEST(relabelled_blocks_move_with_their_ranks) {
  // Rank 1 stands at position 2; of its own block, what it gives is chunk 1 and what it gets chunk 4 + 1.
  const Schedule schedule = pairwise_all_to_all({2, 4});
  CHECK_EQ(text(relabelled(schedule, Collective::all_to_all, Topology(Ranks{0, 0, 1, 1}).across())),
           "send 3 [3+1] send 0 [0+1] send 2 [2+1] recv 3 [7+1] recv 0 [4+1] recv 2 [6+1] copy 5 [1+1] | ");
}

TEST(golden_halving_doubling) {
  CHECK_EQ(text(halving_doubling_near({1, 4})),
           "send 0 [0+2] reduce 0 [2+2] | send 3 [3+1] reduce 3 [2+1] | "
           "send 3 [2+1] recv 3 [3+1] | send 0 [2+2] recv 0 [0+2] | ");
  CHECK_EQ(text(halving_doubling_far({1, 4})),
           "send 3 [2+2] reduce 3 [0+2] | send 0 [0+1] reduce 0 [1+1] | "
           "send 0 [1+1] recv 0 [0+1] | send 3 [0+2] recv 3 [2+2] | ");
}

TEST(golden_hierarchical) {
  const Topology block(Ranks{0, 0, 1, 1}), uneven(Ranks{0, 0, 0, 1});
  CHECK_EQ(text(hierarchical_all_reduce({1, 4, 0, &block})),
           "send 0 [0+2] reduce 0 [2+2] | send 3 [3+1] reduce 3 [2+1] | "
           "send 3 [2+1] recv 3 [3+1] | send 0 [2+2] recv 0 [0+2] | ");
  // Rank 2 owns nothing: the other host has one rank.
  CHECK_EQ(text(hierarchical_all_reduce({2, 4, 0, &uneven})), "send 0 [0+2] | recv 0 [0+2] | ");
  CHECK_EQ(text(hierarchical_reduce_scatter({1, 4, 0, &block})),
           "send 0 [0+1] send 0 [2+1] reduce 0 [1+1] reduce 0 [3+1] | send 3 [3+1] reduce 3 [1+1] | ");
  CHECK_EQ(text(hierarchical_all_gather({3, 4, 0, &uneven})), "send 0 [3+1] recv 0 [0+1] recv 1 [1+1] recv 2 [2+1] | ");
  // The root leads its host, whatever its number.
  CHECK_EQ(text(hierarchical_broadcast({3, 4, 3, &block})), "send 2 [1+1] | send 0 [0+1] | send 2 [0+1] | ");
  CHECK_EQ(text(hierarchical_broadcast({2, 4, 3, &block})), "recv 3 [1+1] | send 1 [1+1] | recv 3 [0+1] | ");
  CHECK_EQ(text(hierarchical_broadcast({1, 4, 3, &block})), "recv 2 [1+1] | send 0 [1+1] recv 0 [0+1] | ");
}

TEST(hierarchical_is_two_shot_on_one_host_and_the_circulant_on_hosts_of_one) {
  const Topology apart(Ranks{0, 1, 2, 3, 4});
  for (int rank = 0; rank < 5; ++rank) {
    CHECK_EQ(text(hierarchical_all_reduce({rank, 5})), text(two_shot_all_reduce({rank, 5})));
    CHECK_EQ(text(hierarchical_all_reduce({rank, 5, 0, &apart})), text(circulant_all_reduce({rank, 5})));
  }
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

TEST(golden_ring) {
  CHECK_EQ(text(ring_all_reduce({0, 3})),
           "send 1 [2+1] reduce 2 [1+1] | send 1 [1+1] reduce 2 [0+1] | "
           "send 1 [0+1] recv 2 [2+1] | send 1 [2+1] recv 2 [1+1] | ");
  CHECK_EQ(text(ring_all_reduce({1, 3})),
           "send 2 [0+1] reduce 0 [2+1] | send 2 [2+1] reduce 0 [1+1] | "
           "send 2 [1+1] recv 0 [0+1] | send 2 [0+1] recv 0 [2+1] | ");
  CHECK_EQ(text(ring_all_reduce({2, 3})),
           "send 0 [1+1] reduce 1 [0+1] | send 0 [0+1] reduce 1 [2+1] | "
           "send 0 [2+1] recv 1 [1+1] | send 0 [1+1] recv 1 [0+1] | ");
}

TEST(golden_circulant) {
  // The worked example at the top of circulant.cc.
  CHECK_EQ(text(circulant_reduce_scatter({0, 5})),
           "send 3 [3+2] reduce 2 [0+2] | send 2 [2+1] reduce 3 [0+1] | send 1 [1+1] reduce 4 [0+1] | ");
  // Chunks 4 and 0 pass the end: two steps, cut at the same place where they arrive.
  CHECK_EQ(text(circulant_reduce_scatter({1, 5})),
           "send 4 [4+1] send 4 [0+1] reduce 3 [1+2] | send 3 [3+1] reduce 4 [1+1] | send 2 [2+1] reduce 0 [1+1] | ");
  CHECK_EQ(text(circulant_reduce_scatter({4, 5})),
           "send 2 [2+2] reduce 1 [4+1] reduce 1 [0+1] | send 1 [1+1] reduce 2 [4+1] | send 0 [0+1] reduce 3 [4+1] | ");
  CHECK_EQ(text(circulant_all_gather({0, 5})),
           "send 4 [0+1] recv 1 [1+1] | send 3 [0+1] recv 2 [2+1] | send 2 [0+2] recv 3 [3+2] | ");
}

}  // namespace
