// The engines' contract on virtual ranks, exact: every algorithm, in place and not, every dtype and operation; the pull
// engine staged and registered, the message engine whole and in segments.
#include <algorithm>
#include <functional>
#include <memory>

#include "message_world.h"
#include "pull_world.h"

namespace gpu_check {
namespace {

/// Of each collective the first algorithm that is no ring, and rings.
bool among_few(const Algorithm& algorithm) {
  if (algorithm.name == std::string("ring")) return true;
  for (const Algorithm& other : algorithms()) {
    if (other.collective == algorithm.collective && other.name != std::string("ring")) return &other == &algorithm;
  }
  return false;
}

bool among_few(DType dtype) {
  return dtype == DType::float32 || dtype == DType::float16 || dtype == DType::uint8 || dtype == DType::complex64;
}

/// Those that share inputs and results follow each other. `named`: the all-reduces that every dtype and operation goes
/// through.
std::vector<Case> contract_cases(int world, const std::vector<const char*>& named, const Options& options) {
  std::vector<Case> cases;
  const auto add = [&](Case c, bool in_place) {
    c.in_place = in_place;
    if (has_place(c)) cases.push_back(c);
  };
  const auto some = static_cast<size_t>(world + 1);
  const std::vector<size_t> counts =
      options.few ? std::vector<size_t>{1, 1237} : std::vector<size_t>{1, some, size_t{123567}};
  for (const size_t count : counts) {
    for (const Algorithm& algorithm : algorithms()) {
      if (options.few && !among_few(algorithm)) continue;
      Case c{&algorithm, world, algorithm.collective == Collective::barrier ? 0 : count};
      c.offset = 4 * (count % 3);
      c.seed = static_cast<unsigned>(count) % 11;
      for (const bool in_place : {false, true}) add(c, in_place);
    }
  }
  for (int d = 0; d < kDTypes; ++d) {
    for (int o = 0; o < kReduceOps; ++o) {
      const auto dtype = static_cast<DType>(d);
      const auto op = static_cast<ReduceOp>(o);
      if (!supports(dtype, op) || (options.few && !among_few(dtype))) continue;
      for (const char* name : named) {
        Case c{find_algorithm(Collective::all_reduce, name), world, 1237, dtype, op};
        c.offset = element_size(dtype);
        add(c, (d + o) % 2 == 1);
      }
    }
  }
  return cases;
}

/// One world serves one case after another: stages of the next are where those of the last are. What failed serves no
/// more.
template <class World>
class Contract {
 public:
  Contract(const std::string& engine, int size, std::function<std::unique_ptr<World>()> make)
      : section_(engine + ", world " + std::to_string(size), kWorld), make_(std::move(make)) {}
  ~Contract() {
    drop(world_);
    section_.conclude();
  }

  void attempt(const Case& c, const std::string& how,
               const std::function<std::string(World&, const Expectation&)>& run) {
    if (section_.hopeless()) return;
    const int before = section_.failures();
    section_.attempt(describe_case(c) + how, [&] {
      if (!world_) world_ = make_();
      if (!expectation_ || !expectation_->fits(c)) expectation_ = std::make_unique<Expectation>(c);
      return run(*world_, *expectation_);
    });
    if (section_.failures() == before) return;
    if constexpr (std::is_same_v<World, MessageWorld>) {
      if (world_) world_->end_failed();
    }
    drop(world_);
  }

 private:
  Section section_;
  const std::function<std::unique_ptr<World>()> make_;
  std::unique_ptr<World> world_;
  std::unique_ptr<Expectation> expectation_;
};

void pull_contract(int size, const Options& options) {
  Contract<PullWorld> contract("pull engine", size, [&] { return std::make_unique<PullWorld>(size, options); });
  std::vector<const char*> named = {"ring", "two_shot"};
  if (!options.few) named = {"ring", "butterfly", "one_shot", "two_shot"};
  size_t turn = 0;
  for (const Case& c : contract_cases(size, named, options)) {
    // Of the many dtypes and operations each goes one of the two ways, and the next of that algorithm the other.
    const bool one_way = c.dtype != DType::int32;
    if (one_way && options.together) continue;
    const bool way = (turn + turn / named.size()) % 2 == 1;
    turn += one_way ? 1 : 0;
    for (const bool registered : {false, true}) {
      if (one_way && registered != way) continue;
      contract.attempt(
          c, registered ? " registered" : " staged",
          [&](PullWorld& world, const Expectation& expectation) { return world.run(c, expectation, registered); });
    }
  }
}

void message_contract(int size, const Options& options) {
  // So little that long messages go in many segments.
  constexpr GpuMessageExecutor::Limits kLimits{size_t{64} << 10, size_t{1} << 20};
  Contract<MessageWorld> contract("message engine", size,
                                  [&] { return std::make_unique<MessageWorld>(size, options, kLimits); });
  std::vector<const char*> named = {"ring", "two_shot"};
  if (!options.few) named = {"ring", "butterfly", "two_shot"};
  for (const Case& c : contract_cases(size, named, options)) {
    contract.attempt(c, "",
                     [&](MessageWorld& world, const Expectation& expectation) { return world.run(c, expectation); });
  }
}

}  // namespace

void pull(const Options& options) {
  for (const int size : options.few ? std::vector{2, 3} : std::vector{2, 3, 4, 8}) {
    if (!device_hangs) attempt("pull engine", [&] { pull_contract(size, options); });
  }
}

void nccl(const Options& options) {
  for (const int size : options.few ? std::vector{2, 3} : std::vector{2, 3, 4}) {
    if (!device_hangs) attempt("message engine", [&] { message_contract(size, options); });
  }
}

}  // namespace gpu_check
