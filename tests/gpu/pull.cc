// The pull engine's contract on virtual ranks: every algorithm, staged and in place, every dtype and operation, exact.
#include <memory>

#include "pull_world.h"

namespace gpu_check {
namespace {

class Contract {
 public:
  Contract(int size, const Options& options)
      : size_(size), options_(options), section_("pull engine, world " + std::to_string(size), kWorld) {}

  void all() {
    const std::vector<const char*> named = options_.few
                                               ? std::vector<const char*>{"ring", "two_shot"}
                                               : std::vector<const char*>{"ring", "butterfly", "one_shot", "two_shot"};
    size_t turn = 0;
    for (const Case& c : contract_cases(size_, named, options_)) {
      // Of the many dtypes and operations each goes one of the two ways, and the next of that algorithm the other.
      const bool one_way = c.dtype != DType::int32;
      if (one_way && options_.together) continue;
      const bool way = (turn + turn / named.size()) % 2 == 1;
      turn += one_way ? 1 : 0;
      for (const bool registered : {false, true}) {
        if (!one_way || registered == way) one(c, registered);
      }
    }
    drop(world_);
    section_.conclude();
  }

 private:
  /// The world serves one case after another: stages of the next are where those of the last are. What failed serves no
  /// more.
  void one(const Case& c, bool registered) {
    if (section_.hopeless()) return;
    const int before = section_.failures();
    section_.attempt(describe_case(c) + (registered ? " registered" : " staged"), [&] {
      if (!world_) world_ = std::make_unique<PullWorld>(size_, options_);
      if (!expectation_ || !expectation_->fits(c)) expectation_ = std::make_unique<Expectation>(c);
      return world_->run(c, *expectation_, registered);
    });
    if (section_.failures() != before) drop(world_);
  }

  const int size_;
  const Options options_;
  Section section_;
  std::unique_ptr<PullWorld> world_;
  std::unique_ptr<Expectation> expectation_;
};

}  // namespace

void pull(const Options& options) {
  for (const int size : options.few ? std::vector{2, 3} : std::vector{2, 3, 4, 8}) {
    if (!device_hangs) attempt("pull engine", [&] { Contract(size, options).all(); });
  }
}

}  // namespace gpu_check
