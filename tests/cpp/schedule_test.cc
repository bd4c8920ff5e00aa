// Structure of every registered schedule, and two golden ones. What schedules compute is proved in Python
// (tests/python/test_prove.py); here: they build, stay inside their buffer, and their messages pair up.
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "schedule/circulant.h"
#include "schedule/registry.h"
#include "schedule/ring.h"

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

void check_step(const Step& step, const Place& place, int parts, Messages& sent, Messages& received) {
  CHECK(inside(step.first, step.count, parts));
  if (step.verb == Verb::copy) {
    CHECK(inside(step.peer, step.count, parts));
    return;
  }
  CHECK(step.peer >= 0 && step.peer < place.world && step.peer != place.rank);
  if (step.verb == Verb::send) {
    sent[{place.rank, step.peer}].push_back(step.count);
  } else {
    received[{step.peer, place.rank}].push_back(step.count);
  }
}

void check_world(const Algorithm& algorithm, int world, int root) {
  Messages sent, received;
  int parts = 0;
  for (int rank = 0; rank < world; ++rank) {
    const Place place{rank, world, root};
    const Schedule schedule = algorithm.make(place);
    if (rank == 0) parts = schedule.parts;
    CHECK_EQ(schedule.parts, parts);
    CHECK_EQ(schedule.parts, expected_parts(algorithm.collective, world, schedule.parts));
    for (const Round& round : schedule.rounds) {
      CHECK(!round.steps.empty());
      for (const Step& step : round.steps) check_step(step, place, parts, sent, received);
    }
    const Chunks in = input_chunks(algorithm.collective, place, parts);
    const Chunks out = output_chunks(algorithm.collective, place, parts);
    CHECK(inside(in.first, in.count, parts) && inside(out.first, out.count, parts));
    if (world == 1 && algorithm.collective != Collective::all_to_all) CHECK_EQ(schedule.rounds.size(), 0u);
  }
  CHECK(sent == received);
}

void every_algorithm_builds() {
  for (const Algorithm& algorithm : algorithms()) {
    for (int world = 1; world <= 64; ++world) {
      check_world(algorithm, world, 0);
      if (!has_root(algorithm.collective)) continue;
      for (int root = 1; root < world; root += world < 10 ? 1 : world - 2) check_world(algorithm, world, root);
    }
  }
}

void registry_finds_by_name() {
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

void golden_ring() {
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

void golden_circulant() {
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

int main() {
  every_algorithm_builds();
  registry_finds_by_name();
  golden_ring();
  golden_circulant();
  return check_result("schedule");
}
