// The message engine's contract on virtual ranks: every algorithm, whole and in segments,
// in place and not, every dtype and operation, exact.
#include <memory>

#include "message_world.h"

namespace gpu_check {
namespace {

// So little that long messages go in many segments.
constexpr GpuMessageExecutor::Limits kLimits{size_t{64} << 10, size_t{1} << 20};

class Contract {
 public:
  Contract(int size, const Options& options)
      : size_(size), options_(options), section_("message engine, world " + std::to_string(size), kWorld) {}

  void all() {
    const std::vector<const char*> named = options_.few ? std::vector<const char*>{"ring", "two_shot"}
                                                        : std::vector<const char*>{"ring", "butterfly", "two_shot"};
    for (const Case& c : contract_cases(size_, named, options_)) one(c);
    drop(world_);
    section_.conclude();
  }

 private:
  void one(const Case& c) {
    if (section_.hopeless()) return;
    const int before = section_.failures();
    section_.attempt(describe_case(c), [&] {
      if (!world_) world_ = std::make_unique<MessageWorld>(size_, options_, kLimits);
      if (!expectation_ || !expectation_->fits(c)) expectation_ = std::make_unique<Expectation>(c);
      return world_->run(c, *expectation_);
    });
    if (section_.failures() == before) return;
    if (world_) world_->end_failed();
    drop(world_);
  }

  const int size_;
  const Options options_;
  Section section_;
  std::unique_ptr<MessageWorld> world_;
  std::unique_ptr<Expectation> expectation_;
};

}  // namespace

void nccl(const Options& options) {
  for (const int size : options.few ? std::vector{2, 3} : std::vector{2, 3, 4}) {
    if (!device_hangs) attempt("message engine", [&] { Contract(size, options).all(); });
  }
}

}  // namespace gpu_check
