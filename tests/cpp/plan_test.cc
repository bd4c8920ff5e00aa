// Plans under every order of events that their waits allow: ranks take steps in random order on a model of memory whose
// cells hold how often each rank's contribution is in them. A missing wait shows as a wrong cell for some seed. As a
// GPU takes plans, too (gpu/pull_program.h): there steps that can be taken side by side are in an order of their own.
// And plans of many ranks, by the memory that making them takes.
#include "plan/plan.h"

#include <malloc.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <map>
#include <new>
#include <numeric>
#include <random>
#include <vector>

#include "check.h"
#include "engine/message/message_plan.h"
#include "engine/pull/pull_plan.h"
#include "gpu/gpu_plan.h"
#include "gpu/pull_program.h"
#include "schedule/registry.h"
#include "schedule/topology.h"
#include "transport/control.h"

using namespace ringlet;

namespace {
size_t bytes_now = 0, bytes_at_most = 0;
}  // namespace

[[gnu::noinline]] void* operator new(size_t bytes) {
  void* const block = std::malloc(bytes);
  if (block == nullptr) throw std::bad_alloc();
  bytes_now += malloc_usable_size(block);
  bytes_at_most = std::max(bytes_at_most, bytes_now);
  return block;
}
[[gnu::noinline]] void operator delete(void* block) noexcept {
  if (block != nullptr) bytes_now -= malloc_usable_size(block);
  std::free(block);
}
void operator delete(void* block, size_t) noexcept { operator delete(block); }

namespace {

using Value = std::vector<int>;  // by (rank, chunk of its input): how often it is in the sum

struct Rank {
  PullPlan plan;
  size_t next = 0;
  uint32_t progress = kSignatureReady;
  std::map<std::pair<int, int>, Value> memory;  // (tensor 0, stage a 1, stage b 2; chunk)
  bool done() const { return next == plan.steps.size(); }
};

int area(Home home) { return home == Home::staging_a ? 1 : home == Home::staging_b ? 2 : 0; }

/// The rank's plan in an order that a GPU might take it in.
PullPlan as_on_gpu(const PullPlan& plan, int rank, std::mt19937& random) {
  const FlatPlan flat = flatten(plan, rank);
  PullPlan taken = plan;
  taken.steps.clear();
  taken.sources.clear();
  for (const cuda::PullSource& s : flat.sources) {
    taken.sources.push_back({s.rank, s.chunk, s.home, s.raw, s.staged});
  }
  for (size_t i = 0; i < flat.steps.size(); i += flat.steps[i].together) {
    for (int k = 0; k < flat.steps[i].together; ++k) {
      const cuda::PullStep& s = flat.steps[i + static_cast<size_t>(k)];
      taken.steps.push_back({static_cast<PlanStep::Kind>(s.kind), s.to, s.tee, s.finish,
                             /*read_later=*/true, s.peer, s.phase, s.chunk, /*chunks=*/1, s.first_source, s.sources});
    }
    std::shuffle(taken.steps.end() - flat.steps[i].together, taken.steps.end(), random);
  }
  return taken;
}

class Model {
 public:
  Model(const Algorithm& algorithm, const Topology& topology, int root, bool in_place, unsigned seed)
      : algorithm_(algorithm), world_(topology.world()), root_(root), random_(seed) {
    for (int q = 0; q < world_; ++q) {
      const PullPlan plan = make_pull_plan(algorithm, {q, world_, root, &topology}, in_place);
      ranks_.push_back({seed % 2 == 1 ? as_on_gpu(plan, q, random_) : plan, 0, kSignatureReady, {}});
      CHECK(q == 0 || ranks_.back().plan.parts == parts_);
      parts_ = ranks_.back().plan.parts;
      const Chunks input = input_chunks(algorithm.collective, {q, world_, root}, parts_);
      for (int c = input.first; c < input.first + input.count; ++c) ranks_[q].memory[{0, c}] = unit(q, c);
    }
  }

  /// Runs to the end in an order drawn from the seed; false where all ranks wait.
  bool run() {
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
      const int rank = able[random_() % able.size()];
      for (unsigned n = 1 + random_() % 12; n > 0 && !ranks_[rank].done() && can_step(ranks_[rank]); --n) step(rank);
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
    for (auto& [info, value] : ranks_[q].memory) {
      if (info.first == 0) value.assign(value.size(), 1000);
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
    return step.kind != PlanStep::Kind::wait || ranks_[step.peer].progress >= step.phase;
  }

  void step(int q) {
    Rank& rank = ranks_[q];
    const PlanStep& step = rank.plan.steps[rank.next++];
    if (step.kind == PlanStep::Kind::publish) rank.progress = step.phase;
    if (step.kind == PlanStep::Kind::combine) combine(rank, step);
    if (rank.done()) leave(q);
  }

  void combine(Rank& rank, const PlanStep& step) {
    for (int i = 0; i < step.chunks; ++i) {
      Value sum(static_cast<size_t>(world_) * static_cast<size_t>(parts_), 0);
      for (int s = 0; s < step.sources; ++s) {
        const Source& source = rank.plan.sources[step.first_source + s];
        const Value& value = ranks_[source.rank].memory[{area(source.home), source.chunk + i}];
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
  std::mt19937 random_;
  std::vector<Rank> ranks_;
};

void every_algorithm(const Topology& topology, const char* what) {
  const int world = topology.world();
  for (const Algorithm& algorithm : algorithms()) {
    if (algorithm.collective == Collective::barrier) continue;
    for (const bool in_place : {false, true}) {
      for (unsigned seed = 0; seed < (kSanitized ? 4 : 12); ++seed) {
        const int root = has_root(algorithm.collective) ? static_cast<int>(seed) % world : 0;
        Model model(algorithm, topology, root, in_place, seed);
        const bool ended = model.run();
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

using Groups = std::vector<int>;

Groups groups_of(const FlatPlan& flat) {
  Groups groups;
  for (size_t i = 0; i < flat.steps.size(); i += flat.steps[i].together) groups.push_back(flat.steps[i].together);
  CHECK_EQ(std::accumulate(groups.begin(), groups.end(), 0), static_cast<int>(flat.steps.size()));
  return groups;
}

/// Of a plan, how many steps are taken at once, one number for each time.
Groups groups(const char* algorithm, bool in_place) {
  return groups_of(flatten(make_pull_plan(*find_algorithm(Collective::all_reduce, algorithm), {0, 8, 0}, in_place), 0));
}

/// Two copies by rank 1, of which the second is of what `second` says.
Groups two_copies(Home to, int chunk, Source second) {
  PullPlan plan;
  PlanStep step{PlanStep::Kind::combine};
  step.sources = 1;
  step.to = Home::staging_a;
  step.chunk = 3;
  plan.steps.push_back(step);
  plan.sources = {{1, 2, Home::input, true}, second};
  step.to = to;
  step.chunk = chunk;
  step.first_source = 1;
  plan.steps.push_back(step);
  plan.body = 2;
  return groups_of(flatten(plan, 1));
}

/// What one writes the other must not touch; input and output may be the same memory.
TEST(not_side_by_side) {
  CHECK(two_copies(Home::staging_a, 4, {1, 2, Home::input, true}) == Groups{2});
  CHECK(two_copies(Home::staging_a, 3, {1, 5, Home::input, true}) == (Groups{1, 1}));    // both write there
  CHECK(two_copies(Home::output, 5, {1, 3, Home::staging_a, false}) == (Groups{1, 1}));  // reads what the first wrote
  CHECK(two_copies(Home::output, 5, {0, 3, Home::staging_a, false}) == Groups{2});       // which is another rank's
  CHECK(two_copies(Home::output, 2, {1, 5, Home::input, true}) == (Groups{1, 1}));       // writes what the first reads
  CHECK(two_copies(Home::output, 5, {1, 6, Home::input, true, Home::staging_a}) == Groups{2});
  CHECK(two_copies(Home::output, 5, {1, 3, Home::input, true, Home::staging_a}) == (Groups{1, 1}));  // as peers see it
}

/// What each way through memory costs is paid once for all peers, not once for each.
TEST(side_by_side) {
  CHECK(groups("one_shot", false) == (Groups{1, 1, 7, 1, 1}));           // put, publish, wait, add, publish
  CHECK(groups("two_shot", false) == (Groups{7, 1, 7, 1, 1, 7, 7, 1}));  // and wait, fetch, publish
}

bool runs_in_place(Collective collective, const char* algorithm, int world) {
  return make_faster_plan(*find_algorithm(collective, algorithm), {0, world, 0}).in_place;
}

/// What copies every result in place as it would copy every input staged is staged.
TEST(in_place_if_that_saves_copies) {
  for (int world = 2; world <= 9; ++world) {
    CHECK(runs_in_place(Collective::all_reduce, "two_shot", world));
    CHECK(runs_in_place(Collective::all_reduce, "ring", world));
    const bool copies_all = world == 2 || world == 8;  // after an odd number of exchanges, and nobody folds
    CHECK(runs_in_place(Collective::all_reduce, "butterfly", world) == !copies_all);
    CHECK(!runs_in_place(Collective::all_reduce, "one_shot", world));
    CHECK(runs_in_place(Collective::all_gather, "ring", world));
    CHECK(runs_in_place(Collective::reduce, "star", world));
  }
}

/// Lengths of blocks are looked up by place, so the built-in algorithms take blocks of different sizes.
TEST(blocks_stay_in_places_of_their_length) {
  for (const Algorithm& algorithm : algorithms()) {
    for (int world = 2; world <= 9; ++world) {
      std::vector<Schedule> ranks;
      for (int q = 0; q < world; ++q) ranks.push_back(schedule_of(algorithm, {q, world, world - 1}));
      CHECK(keeps_lengths(algorithm.collective, ranks));
    }
  }
  // Rank 0's block for rank 2 waits at rank 1 in the place of rank 2's block, or of rank 0's own.
  const auto relayed = [](int sent, int place) {
    std::vector<Schedule> ranks(3, Schedule(6));
    ranks[0].round().send(1, {sent, 1});
    ranks[1].round().recv(0, {place, 1});
    return keeps_lengths(Collective::all_to_all, ranks);
  };
  CHECK(!relayed(2, 5) && !relayed(2, 3) && relayed(1, 3));
}

/// All reads of a round see the values from before it, in whatever order its steps stand.
Schedule copying_what_it_reduces(const RankInfo& info) {
  Schedule schedule(/*parts=*/2);
  schedule.round().send(1 - info.rank, {0, 1}).reduce(1 - info.rank, {0, 1}).copy({0, 1}, 1);
  return schedule;
}

TEST(copies_come_first) {
  const Algorithm algorithm{"copying", Collective::all_reduce, copying_what_it_reduces, ""};
  for (const bool in_place : {false, true}) {
    const PullPlan plan = make_pull_plan(algorithm, {0, 2, 0}, in_place);
    std::vector<int> written;
    for (const PlanStep& step : plan.steps) {
      if (step.kind == PlanStep::Kind::combine && step.to == Home::output) written.push_back(step.chunk);
    }
    CHECK(written.front() == 1);
  }
}

template <bool copies>
Schedule swapping(const RankInfo& info) {
  Schedule schedule(/*parts=*/2);
  Round& round = schedule.round();
  round.send(1 - info.rank, {0, 1}).recv(1 - info.rank, {0, 1});
  if (copies) round.copy({0, 1}, 1);
  return schedule;
}

/// A message that arrives early waits for the copies of its round.
TEST(copies_read_before_a_message_arrives) {
  const Algorithm swaps{"swaps", Collective::all_reduce, &swapping<false>, ""};
  const Algorithm keeps{"keeps", Collective::all_reduce, &swapping<true>, ""};
  CHECK_EQ(lower(Schedules(swaps, {0, 2, 0}), 0, Reach::messages).received.front().free_from, 0);
  CHECK_EQ(lower(Schedules(keeps, {0, 2, 0}), 0, Reach::messages).received.front().free_from, 1);
}

/// The most bytes that `make` holds at once.
template <typename Make>
size_t bytes_for(Make make) {
  const size_t before = bytes_now;
  bytes_at_most = before;
  make();
  return bytes_at_most - before;
}

/// What making a plan may take grows as the schedules do, and what a plan has as the rank's own.
TEST(plans_of_many_ranks) {
  const int world = kSanitized ? 128 : few_cases() ? 256 : 1024;
  std::vector<int> cyclic;
  for (int rank = 0; rank < world; ++rank) cyclic.push_back(rank % (world / 8));
  const Topology topology(cyclic);
  size_t most = 0;
  double longest = 0;
  for (const Algorithm& algorithm : algorithms()) {
    const RankInfo info{world / 3, world, 0, std::strcmp(algorithm.name, "ring") == 0 ? nullptr : &topology};
    size_t steps = 0, chunks = 0, places = 0;
    {
      const Schedules schedules(algorithm, info);
      for (int q = 0; q < world; ++q) steps += schedules[q].steps.size();
      for (const Step& step : schedules[info.rank].steps) chunks += 1 + static_cast<size_t>(step.count);
      chunks += static_cast<size_t>(schedules[info.rank].parts + schedules[info.rank].rounds());
      places = static_cast<size_t>(schedules[info.rank].parts) * static_cast<size_t>(world);
    }
    size_t length = 0;
    const std::array<std::function<void()>, 4> makes{
        [&] { length = make_pull_plan(algorithm, info, false).steps.size(); },
        [&] { length = make_faster_plan(algorithm, info).steps.size(); },
        [&] { length = make_message_plan(algorithm, info).sources.size(); },
        [&] { length = make_gpu_plan(algorithm, info, true).sources.size(); }};
    for (const auto& make : makes) {
      const auto began = std::chrono::steady_clock::now();
      const size_t bytes = bytes_for(make);
      longest = std::max(longest, std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count());
      most = std::max(most, bytes);
      if (bytes > (size_t{1} << 20) + 32 * steps + 16 * places + 256 * chunks || length > 3 * chunks)
        std::fprintf(stderr, "%s %s: %zu bytes for %zu steps\n", name(algorithm.collective), algorithm.name, bytes,
                     steps);
      CHECK(bytes <= (size_t{1} << 20) + 32 * steps + 16 * places + 256 * chunks);
      CHECK(bytes <= size_t{200} << 20);
      CHECK(length <= 3 * chunks);
    }
  }
  std::printf("a plan of %d ranks: at most %zu MiB, %.2f s\n", world, most >> 20, longest);
}

TEST(every_algorithm_along_every_topology) {
  const int most = kSanitized ? 8 : 13;
  for (int world = 1; world <= most; ++world) every_algorithm(Topology(std::vector<int>(world, 0)), "one host");
  for (int world = 2; world <= most; world += 2) {
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
}

}  // namespace
