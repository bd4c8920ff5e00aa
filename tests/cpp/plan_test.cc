// Plans under every order of events that their waits allow: ranks take steps in random order on a model of memory whose
// cells hold how often each rank's contribution is in them. A missing wait shows as a wrong cell for some seed.
#include "engine/plan.h"

#include <array>
#include <map>
#include <random>
#include <vector>

#include "check.h"
#include "schedule/registry.h"
#include "schedule/topology.h"
#include "transport/control.h"

using namespace ringlet;

namespace {

using Value = std::vector<int>;  // by (rank, chunk of its input): how often it is in the sum

struct Rank {
  Plan plan;
  size_t next = 0;
  uint32_t progress = kAnnounced;
  std::map<std::pair<int, int>, Value> memory;  // (tensor 0, stage a 1, stage b 2; chunk)
  bool done() const { return next == plan.steps.size(); }
};

int area(Space space) { return space == Space::stage_a ? 1 : space == Space::stage_b ? 2 : 0; }

class Model {
 public:
  Model(const Algorithm& algorithm, const Topology& topology, int root, bool in_place)
      : algorithm_(algorithm), world_(topology.world()), root_(root) {
    for (int q = 0; q < world_; ++q) {
      ranks_.push_back({make_plan(algorithm, {q, world_, root, &topology}, in_place), 0, kAnnounced, {}});
      parts_ = ranks_.back().plan.parts;
      const Chunks input = input_chunks(algorithm.collective, {q, world_, root}, parts_);
      for (int c = input.first; c < input.first + input.count; ++c) ranks_[q].memory[{0, c}] = unit(q, c);
    }
  }

  /// Runs to the end in an order drawn from `seed`; false where all ranks wait.
  bool run(unsigned seed) {
    std::mt19937 random(seed);
    while (true) {
      std::vector<int> able;
      bool all_done = true;
      for (int q = 0; q < world_; ++q) {
        if (ranks_[q].done()) continue;
        all_done = false;
        if (can_step(ranks_[q])) able.push_back(q);
      }
      if (all_done) return true;
      if (able.empty()) return false;
      // Long runs of one rank are the orders that break things; single steps hardly ever do.
      const int rank = able[random() % able.size()];
      for (unsigned n = 1 + random() % 12; n > 0 && !ranks_[rank].done() && can_step(ranks_[rank]); --n) step(rank);
    }
  }

  bool outputs_right() const { return right_; }

 private:
  /// A rank's call returns: its output must be there, and its caller may write its tensors at once.
  void leave(int q) {
    const Chunks output = output_chunks(algorithm_.collective, {q, world_, root_}, parts_);
    for (int c = output.first; c < output.first + output.count; ++c) {
      right_ = right_ && ranks_[q].memory[{0, c}] == expected(q, c);
    }
    for (auto& [place, value] : ranks_[q].memory) {
      if (place.first == 0) value.assign(value.size(), 1000);
    }
  }

  Value unit(int rank, int chunk) const {
    Value value(static_cast<size_t>(world_) * static_cast<size_t>(parts_), 0);
    value[static_cast<size_t>(rank * parts_ + chunk)] = 1;
    return value;
  }

  Value expected(int rank, int chunk) const {
    Value value(static_cast<size_t>(world_) * static_cast<size_t>(parts_), 0);
    const auto add = [&](int q, int c) { value[static_cast<size_t>(q * parts_ + c)] += 1; };
    switch (algorithm_.collective) {
      case Collective::all_gather:
      case Collective::gather: add(chunk, chunk); break;
      case Collective::broadcast:
      case Collective::scatter: add(root_, chunk); break;
      case Collective::all_to_all: add(chunk - world_, rank); break;
      default:
        for (int q = 0; q < world_; ++q) add(q, chunk);
    }
    return value;
  }

  bool can_step(const Rank& rank) const {
    const PlanStep& step = rank.plan.steps[rank.next];
    return step.kind != PlanStep::Kind::wait || ranks_[step.peer].progress >= step.stage;
  }

  void step(int q) {
    Rank& rank = ranks_[q];
    const PlanStep& step = rank.plan.steps[rank.next++];
    if (step.kind == PlanStep::Kind::publish) rank.progress = step.stage;
    if (step.kind == PlanStep::Kind::combine) combine(rank, step);
    if (rank.done()) leave(q);
  }

  void combine(Rank& rank, const PlanStep& step) {
    for (int i = 0; i < step.chunks; ++i) {
      Value sum(static_cast<size_t>(world_) * static_cast<size_t>(parts_), 0);
      for (int s = 0; s < step.sources; ++s) {
        const Source& source = rank.plan.sources[step.first_source + s];
        const Value& value = ranks_[source.rank].memory[{area(source.space), source.chunk + i}];
        for (size_t k = 0; k < value.size(); ++k) sum[k] += value[k];
      }
      rank.memory[{area(step.to), step.chunk + i}] = sum;
      if (step.tee) rank.memory[{0, step.chunk + i}] = sum;
    }
  }

  const Algorithm& algorithm_;
  int world_;
  int root_;
  int parts_ = 0;
  bool right_ = true;
  std::vector<Rank> ranks_;
};

void every_algorithm(const Topology& topology, const char* what) {
  const int world = topology.world();
  for (const Algorithm& algorithm : algorithms()) {
    if (algorithm.collective == Collective::barrier) continue;
    for (const bool in_place : {false, true}) {
      for (unsigned seed = 0; seed < (kSanitized ? 3 : 12); ++seed) {
        const int root = has_root(algorithm.collective) ? static_cast<int>(seed) % world : 0;
        Model model(algorithm, topology, root, in_place);
        const bool ended = model.run(seed);
        const bool right = ended && model.outputs_right();
        if (!right)
          std::fprintf(stderr, "%s %s world %d, %s, %s seed %u\n", algorithm.name, name(algorithm.collective), world,
                       what, in_place ? "in place" : "staged", seed);
        CHECK(ended);
        CHECK(right);
      }
    }
  }
}

}  // namespace

int main() {
  for (int world = 1; world <= 13; ++world) every_algorithm(Topology(std::vector<int>(world, 0)), "one host");
  for (int world = 2; world <= 12; world += 2) {
    std::vector<int> block, cyclic, uneven;
    for (int rank = 0; rank < world; ++rank) {
      block.push_back(rank / 2);
      cyclic.push_back(rank % (world / 2));
      uneven.push_back(rank * rank % 5);
    }
    every_algorithm(Topology(block), "pairs");
    every_algorithm(Topology(cyclic), "pairs, cyclic");
    every_algorithm(Topology(uneven), "uneven");
  }
  return check_result("plan");
}
