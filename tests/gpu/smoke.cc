// Seconds that tell whether anything else is worth running: one call of the pull engine and one of NCCL's, exact. An
// NCCL that is named and refuses is a failure.
#include <memory>

#include "nccl_ranks.h"
#include "pull_world.h"

namespace gpu_check {

void smoke(const Options& options) {
  constexpr int kRanks = 2;
  const Case c{find_algorithm(Collective::all_reduce, "two_shot"), kRanks, 1000, DType::float32};
  const Expectation expectation(c, whole_numbers(kRanks, c.count));
  auto world = std::make_unique<PullWorld>(kRanks, options);
  Section section("smoke");
  section.attempt("pull engine", [&] { return world->run(c, expectation, /*registered=*/false); });
  section.attempt("ncclAllReduce", [&] {
    const std::unique_ptr<NcclRanks> nccl = NcclRanks::make(kRanks);
    if (!nccl) return std::string();
    world->spoil();
    std::vector<NcclRanks::Buffers> buffers;
    for (auto& rank : world->ranks()) buffers.push_back({rank->call.input, rank->call.output, rank->stream.get()});
    nccl->sum_of_floats(buffers, c.count);
    world->wait();
    return world->difference(expectation);
  });
  drop(world);
  section.conclude();
}

}  // namespace gpu_check
