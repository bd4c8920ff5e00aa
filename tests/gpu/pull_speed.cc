// The pull engine's time for small all-reduces on virtual ranks that have what a group's ranks have, and NCCL's own
// beside it: medians, of ratios within pairs. NCCL tunes for what it takes for PCI on one GPU, so it is also told the
// protocols that it takes between GPUs.
//
// Each rank's calls are a CUDA graph, ringlet's and NCCL's; the time is until the last rank is done. ringlet's own
// times come first, for all worlds: NCCL may refuse ranks that share a device, or not come back.
#include <cstdlib>
#include <memory>

#include "nccl_ranks.h"
#include "pull_world.h"
#include "replay.h"

namespace gpu_check {
namespace {

struct Variant {
  const char* algorithm;
  bool registered;
};
/// What NCCL chooses, and two that it is told.
struct Chosen {
  const char* algorithm;
  const char* protocol;
  const char* name;
};
constexpr Chosen kChosen[] = {
    {nullptr, nullptr, ""}, {"Ring", "LL", " by Ring, LL"}, {"Ring", "LL128", " by Ring, LL128"}};

constexpr Variant kVariants[] = {{"one_shot", false}, {"one_shot", true}, {"two_shot", false}, {"two_shot", true}};

/// A world, and the call that is timed on it.
class Timed {
 public:
  Timed(int size, const Options& options)
      : size_(size),
        calls_(options.few ? 3 : 20),
        replays_(options.few ? 1 : 10),
        rounds_(options.few ? 1 : 7),
        world_(new PullWorld(size, options, /*as_groups=*/true)) {}
  ~Timed() { drop(world_); }

  void prepare(const Variant& variant, size_t bytes) {
    variant_ = variant;
    const Case c{find_algorithm(Collective::all_reduce, variant.algorithm), size_, bytes / 4, DType::float32};
    expectation_ = std::make_unique<Expectation>(c, whole_numbers(size_, c.count));
    name_ = std::string(variant.algorithm) + (variant.registered ? " registered, " : ", ") + std::to_string(size_) +
            " virtual ranks, " + std::to_string(bytes) + " B";
  }
  const std::string& name() const { return name_; }

  void check_own() {
    const std::string wrong = world_->run(expectation_->shape(), *expectation_, variant_.registered);
    if (!wrong.empty()) throw DeviceError(wrong);
  }
  void check_nccl(NcclRanks& nccl) {
    world_->spoil();
    nccl.sum_of_floats(buffers(), expectation_->shape().count);
    world_->wait();
    const std::string wrong = world_->difference(*expectation_);
    if (!wrong.empty()) throw DeviceError("ncclAllReduce: " + wrong);
  }

  void tell_own() {
    std::vector<double> times;
    const std::unique_ptr<Replay> own = own_calls();
    for (int round = 0; round < rounds_; ++round) times.push_back(microseconds(*own));
    check();
    tell(name_, median(times), "us");
  }
  void tell_pairs(NcclRanks& nccl, const char* chosen) {
    std::vector<double> ratios;
    const std::unique_ptr<Replay> own = own_calls();
    Replay theirs(streams(), calls_, [&, all = buffers()] { nccl.sum_of_floats(all, expectation_->shape().count); });
    for (int round = 0; round < rounds_; ++round) {
      const double own_time = microseconds(*own);
      ratios.push_back(microseconds(theirs) / own_time);
    }
    check();
    tell(name_ + ": ncclAllReduce's time" + chosen, median(ratios), "of ringlet's");
  }

 private:
  std::unique_ptr<Replay> own_calls() {
    return std::make_unique<Replay>(streams(), calls_, [this] { world_->launch(variant_.registered); });
  }
  double microseconds(Replay& replay) {
    replay.launch();
    world_->wait();
    return 1e6 / (calls_ * replays_) * seconds([&] {
             for (int i = 0; i < replays_; ++i) replay.launch();
             world_->wait();
           });
  }
  std::vector<void*> streams() {
    std::vector<void*> all;
    for (auto& rank : world_->ranks()) all.push_back(rank->stream.get());
    return all;
  }
  void check() {
    for (auto& rank : world_->ranks()) (variant_.registered ? rank->registered : rank->staged).check("a call");
  }
  std::vector<NcclRanks::Buffers> buffers() {
    std::vector<NcclRanks::Buffers> all;
    for (auto& rank : world_->ranks()) all.push_back({rank->call.input, rank->call.output, rank->stream.get()});
    return all;
  }

  const int size_, calls_, replays_, rounds_;  // calls of a graph, which is replayed so often in a round
  std::unique_ptr<PullWorld> world_;
  Variant variant_{};
  std::unique_ptr<Expectation> expectation_;
  std::string name_;
};

/// For every variant and size; `act` may throw, and another world takes over then.
void each(int size, const Options& options, const std::string& what, const std::function<void(Timed&)>& act) {
  Section section(what + ", " + std::to_string(size) + " virtual ranks", kWorld);
  std::unique_ptr<Timed> timed;
  const size_t most = options.few ? 1024 : size_t{1} << 20;
  for (size_t bytes = 256; bytes <= most; bytes *= 4) {
    for (const Variant& variant : kVariants) {
      if (size > 4 && variant.algorithm != std::string("one_shot")) continue;
      if (section.hopeless()) break;
      const bool went_well = section.attempt(std::string(variant.algorithm) + ", " + std::to_string(bytes) + " B", [&] {
        if (!timed) timed = std::make_unique<Timed>(size, options);
        timed->prepare(variant, bytes);
        timed->check_own();
        act(*timed);
        return std::string();
      });
      if (!went_well) timed.reset();
    }
  }
  timed.reset();
  section.conclude();
}

void beside_nccl(int size, const Chosen& chosen, const Options& options) {
  const auto set = [](const char* name, const char* value) {  // NCCL looks when a communicator is made
    value == nullptr ? ::unsetenv(name) : ::setenv(name, value, 1);
  };
  set("NCCL_ALGO", chosen.algorithm);
  set("NCCL_PROTO", chosen.protocol);
  const std::unique_ptr<NcclRanks> nccl = NcclRanks::make(size);
  if (!nccl) return;
  each(size, options, std::string("pull engine beside NCCL") + chosen.name, [&](Timed& timed) {
    timed.check_nccl(*nccl);
    timed.tell_pairs(*nccl, chosen.name);
  });
}

}  // namespace

void pull_speed(const Options& options) {
  for (const int size : options.few ? std::vector{2} : std::vector{2, 4, 8}) {
    attempt("pull engine's speed", [&] { each(size, options, "pull engine's speed", &Timed::tell_own); });
  }
  for (const int size : options.few ? std::vector{2} : std::vector{2, 4}) {
    for (const Chosen& chosen : kChosen) {
      if (!device_hangs) attempt("NCCL's own all-reduce", [&] { beside_nccl(size, chosen, options); });
    }
  }
}

}  // namespace gpu_check
