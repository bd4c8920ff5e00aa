// The message engine's time for large all-reduces on virtual ranks, and ncclAllReduce's beside it, on the same
// communicators, streams and buffers, in turns: medians, of ratios within pairs.
//
// ringlet's calls are recorded, and one thread launches what all ranks' engines made of them: the engines' own time on the
// host is not in the times. Peers on one GPU get two channels: NCCL_MAX_CTAS=2 gives a collective no more. Results are
// looked at before, in some places where they are long.
#include <algorithm>
#include <memory>

#include "message_world.h"

using namespace reduce_reference;

namespace gpu_check {
namespace {

constexpr size_t kMiB = size_t{1} << 20;
constexpr size_t kBlock = 1000003;  // elements of the inputs, repeated

class Timed {
 public:
  Timed(int size, const Options& options)
      : size_(size), rounds_(options.few ? 1 : 7), world_(new MessageWorld(size, options, {})) {}
  ~Timed() {
    drop(world_);
    for (auto& buffer : buffers_) drop(buffer);
  }

  /// With buffers of so many bytes, or of as many as there is memory for.
  void start(size_t most_bytes) {
    allocate(most_bytes);
    const std::vector<Bytes> blocks = whole_numbers(size_, kBlock);
    total_ = reference(DType::float32, ReduceOp::sum, blocks, {});
    for (size_t q = 0; q < blocks.size(); ++q) repeat(buffers_[q]->input, blocks[q], filling_);
  }
  void end_failed() { world_->end_failed(); }

  void compare(const char* algorithm, size_t bytes) {
    if (bytes > buffers_[0]->input.size()) return;
    prepare(algorithm, bytes);
    const std::string name = std::string(algorithm) + ", " + ranks() + ", " + std::to_string(bytes) + " B";
    const int calls = static_cast<int>(std::clamp<size_t>(64 * kMiB / bytes, 2, 20));
    std::vector<double> times, ratios;
    world_->record(1);
    check([&] { own(); });
    check([&] { nccls_own(1); });
    world_->record(calls);
    for (int round = 0; round < rounds_; ++round) {
      times.push_back(seconds([&] { own(); }) / calls);
      ratios.push_back(seconds([&] { nccls_own(calls); }) / (times.back() * calls));
    }
    tell(name, 1e6 * median(times), "us");
    tell(name + ": ncclAllReduce's time", median(ratios), "of ringlet's");
  }

 private:
  struct Buffer {
    explicit Buffer(size_t bytes) : input(bytes), output(bytes) {}
    Memory input, output;
  };

  std::string ranks() const { return std::to_string(size_) + " virtual ranks"; }

  void allocate(size_t bytes) {
    for (;; bytes /= 4) {
      try {
        while (buffers_.size() < static_cast<size_t>(size_)) buffers_.push_back(std::make_unique<Buffer>(bytes));
        return;
      } catch (const DeviceError& error) {
        buffers_.clear();
        say(ranks() + ", buffers of " + std::to_string(bytes) + " B: not run: " + error.what());
        if (bytes <= kMiB) throw;
      }
    }
  }

  void prepare(const char* algorithm, size_t bytes) {
    const Case c{find_algorithm(Collective::all_reduce, algorithm), size_, bytes / 4, DType::float32};
    for (size_t q = 0; q < buffers_.size(); ++q) {
      MessageWorld::Rank& rank = *world_->ranks()[q];
      rank.call = call_of(c, static_cast<int>(q));
      rank.call.input = buffers_[q]->input.data();
      rank.call.output = buffers_[q]->output.data();
    }
  }

  void own() {
    world_->play();
    wait("");
  }
  void nccls_own(int calls) {
    std::vector<NcclRanks::Buffers> buffers;
    for (auto& rank : world_->ranks()) buffers.push_back({rank->call.input, rank->call.output, rank->stream.get()});
    for (int i = 0; i < calls; ++i) world_->nccl().sum_of_floats(buffers, world_->ranks()[0]->call.count);
    wait("ncclAllReduce: ");
  }
  void wait(const char* what) {
    if (const std::string late = world_->wait(); !late.empty()) throw DeviceError(what + late);
  }

  void check(const std::function<void()>& all_reduce) {
    const size_t bytes = world_->ranks()[0]->call.count * 4;
    const size_t window = std::min(bytes, 16 * kMiB), stride = std::max(window, (bytes - window) / 3);
    for (auto& buffer : buffers_) repeat(buffer->output, Bytes(kMiB, std::byte{0xa5}), filling_);
    all_reduce();
    for (size_t q = 0; q < buffers_.size(); ++q) {
      for (size_t at = 0; at + window <= bytes; at += stride) {
        const Bytes seen = buffers_[q]->output.read(at, window);
        const std::string wrong = difference(seen.data(), repeated(total_, at, window).data(), window);
        if (!wrong.empty())
          throw DeviceError("rank " + std::to_string(q) + ", from byte " + std::to_string(at) + ": " + wrong);
      }
    }
  }

  const int size_, rounds_;
  // One for all ranks: there are as many streams in a process that do not wait for each other as hardware queues, 32.
  Stream filling_;
  std::unique_ptr<MessageWorld> world_;
  Bytes total_;  // of the inputs' blocks
  std::vector<std::unique_ptr<Buffer>> buffers_;
};

void one_world(int size, const Options& options) {
  Section section("message engine's speed, " + std::to_string(size) + " virtual ranks", kWorld);
  const std::vector<size_t> sizes =
      options.few ? std::vector{kMiB / 16} : std::vector{kMiB, 16 * kMiB, 64 * kMiB, 256 * kMiB};
  std::unique_ptr<Timed> timed;
  for (const char* algorithm : {"ring", "two_shot", "butterfly"}) {
    for (const size_t bytes : sizes) {
      if (section.hopeless()) break;
      const bool went_well = section.attempt(std::string(algorithm) + ", " + std::to_string(bytes) + " B", [&] {
        if (!timed) {
          timed = std::make_unique<Timed>(size, options);
          timed->start(sizes.back());
        }
        timed->compare(algorithm, bytes);
        return std::string();
      });
      if (went_well) continue;
      if (timed) timed->end_failed();
      timed.reset();
    }
  }
  timed.reset();
  section.conclude();
}

}  // namespace

void nccl_speed(const Options& options) {
  for (const int size : options.few ? std::vector{2} : std::vector{2, 4}) {
    if (!device_hangs) attempt("message engine's speed", [&] { one_world(size, options); });
  }
}

}  // namespace gpu_check
