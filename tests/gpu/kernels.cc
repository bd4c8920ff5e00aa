// The device's reductions against the scalar reference, byte for byte: every dtype and operation, packs and edges,
// addresses that agree by 16 and that do not, in place and not, with guards; and one of more bytes than 32 bits count.
#include <algorithm>
#include <memory>
#include <span>

#include "pull_world.h"

using namespace reduce_reference;

namespace gpu_check {
namespace {

constexpr size_t kPeriod = 1531, kLarge = 100003;  // elements

/// Where inputs and outputs lie.
struct Shape {
  size_t count;
  size_t offset;  // of everything, in bytes past a line ...
  size_t apart;   // ... and how much further each source lies
};

class Reductions {
 public:
  explicit Reductions(const Options& options) : options_(options) {}

  void all_of(Section& section, DType dtype, bool tame) {
    for (const int n : options_.few ? std::vector{1, 2, 3} : std::vector{1, 2, 3, 8}) {
      const std::vector<Shape> shapes = shapes_of(dtype, n, tame);
      std::vector<Bytes> srcs;
      for (int i = 0; i < n; ++i) srcs.push_back(random_input(dtype, shapes.back().count, tame, random_));
      for (int o = 0; o < kReduceOps; ++o) {
        const auto op = static_cast<ReduceOp>(o);
        if (!supports(dtype, op)) continue;
        for (const Finish& finish : finishes(op, n)) in_shapes(section, {dtype, op, srcs, finish, 0}, shapes);
      }
    }
  }

  /// As many sources as a kernel takes.
  void most_sources(Section& section) {
    std::vector<Bytes> srcs;
    for (int i = 0; i < device().most_sources; ++i)
      srcs.push_back(random_input(DType::float32, kPeriod, true, random_));
    in_shapes(section, {DType::float32, ReduceOp::sum, srcs, {}, 0}, {{64, 0, 0}, {kPeriod, 0, 0}, {kPeriod, 4, 4}});
  }

  /// All codes of the small floats, scaled: the device converts float16 by its own instructions, which no host test can
  /// run.
  void conversions(Section& section) {
    for (const DType dtype : kSmallFloats) {
      const std::vector<Bytes> codes{all_codes(dtype)};
      const size_t count = codes[0].size() / element_size(dtype);
      for (const float scale : kRoundingScales) {
        if (options_.few && scale != 0.75f && scale != 0x1.8p-10f) continue;
        in_shapes(section, {dtype, ReduceOp::premul_sum, codes, {0, scale, 1}, 0}, {{count, 0, 0}});
      }
    }
  }

 private:
  std::vector<Shape> shapes_of(DType dtype, int n, bool tame) const {
    const size_t unit = alignment(dtype);
    if (options_.few) return {{1, 0, 0}, {kPeriod, 0, 0}, {kPeriod, unit, unit}};
    std::vector<Shape> all;
    for (const size_t count : {size_t{1}, size_t{64}, kPeriod, kLarge}) {
      if (count == kLarge && (n > 3 || tame)) continue;
      for (const size_t offset : {size_t{0}, unit}) {
        for (const size_t apart : {size_t{0}, unit}) all.push_back({count, offset, apart});
      }
    }
    return all;
  }

  void in_shapes(Section& section, const Reduction& reduction, const std::vector<Shape>& shapes) {
    const Bytes expected = reference(reduction.dtype, reduction.op, reduction.srcs, reduction.finish);
    for (const auto& [count, offset, apart] : shapes) {
      // One way for each of the longest, whose copies to and from the host take longer than all else.
      const bool one_way = options_.few || count >= kLarge;
      for (int way = 0; way < 3; ++way) {
        if (section.hopeless()) return;
        if (one_way && way != turn_ % 3) continue;
        Reduction one = {reduction.dtype, reduction.op, reduction.srcs, reduction.finish,
                         count,           offset,       apart,          static_cast<Into>(way)};
        section.attempt("a reduction", [&] {
          return wrong_after(one, expected, [&](const ReduceArgs& args, auto& buffers) { run(one, args, buffers); });
        });
      }
      ++turn_;
    }
  }

  void run(const Reduction& one, ReduceArgs args, std::vector<Buffer>& buffers) {
    twins_.resize(std::max(twins_.size(), buffers.size()));
    for (size_t i = 0; i < buffers.size(); ++i) twins_[i].upload(buffers[i]);
    const std::span twins(twins_.data(), buffers.size());
    std::vector<const std::byte*> srcs;
    for (int i = 0; i < args.n; ++i) srcs.push_back(on_device(twins, args.srcs[i]));
    args.srcs = srcs.data();
    args.dst = on_device(twins, args.dst);
    args.dst2 = args.dst2 == nullptr ? nullptr : on_device(twins, args.dst2);
    ok(device().reduce(&args, one.dtype, one.op, stream_.get()), "launching a reduction");
    stream_.wait();
    for (Twin& twin : twins) twin.download();
  }

  const Options options_;
  Stream stream_;
  std::vector<Twin> twins_;
  std::mt19937_64 random_{1};
  int turn_ = 0;
};

void reductions(const Options& options) {
  Section all("reductions");
  Reductions reductions(options);
  for (int d = 0; d < kDTypes; ++d) {
    const auto dtype = static_cast<DType>(d);
    Section section(std::string("reductions of ") + name(dtype));
    for (const bool tame : {false, true}) {
      // Integers have none but random bits.
      if (!tame || (!options.few && (is_floating(dtype) || is_complex(dtype)))) reductions.all_of(section, dtype, tame);
    }
    if (dtype == DType::float32) reductions.most_sources(section);
    if (section.failures() > 0) section.conclude();
    all.add(section);
  }
  all.conclude();
  Section conversions("conversions");
  reductions.conversions(conversions);
  conversions.conclude();
}

/// More bytes, and more elements, than 32 bits count; addresses on both sides of each bound are looked at.
void beyond_32_bits(const Options& options) {
  constexpr size_t kBytes = (size_t{1} << 32) + 12345, kWindow = 65536;
  if (options.few || device_hangs) return;
  std::unique_ptr<Memory> memory[3];
  try {
    for (auto& one : memory) one = std::make_unique<Memory>(kBytes);
  } catch (const DeviceError& error) {
    return say(std::string("sum of more than 4 GiB: not run: ") + error.what());
  }
  Stream stream;
  std::mt19937_64 random(3);
  // No power of two, or an address that is wrong by one would hold the same.
  const Bytes a = random_bytes(4194301, random), b = random_bytes(4194301, random);
  const Bytes poison(1 << 20, Buffer::kFill);
  repeat(*memory[0], a, stream);
  repeat(*memory[1], b, stream);
  repeat(*memory[2], poison, stream);
  const std::byte* srcs[] = {memory[0]->data(), memory[1]->data()};
  ReduceArgs args{.dst = memory[2]->data(), .srcs = srcs, .n = 2, .count = kBytes};
  ok(device().reduce(&args, DType::uint8, ReduceOp::sum, stream.get()), "launching a reduction");
  stream.wait();
  Section section("sum of more than 4 GiB");
  const size_t middle = size_t{1} << 31, high = size_t{1} << 32;
  for (const size_t at : {size_t{0}, middle - kWindow, middle, high - kWindow, high, kBytes - kWindow}) {
    const size_t bytes = std::min(kWindow, kBytes - at);
    section.attempt("bytes from " + std::to_string(at), [&] {
      const Bytes wanted = reference(DType::uint8, ReduceOp::sum, {repeated(a, at, bytes), repeated(b, at, bytes)}, {});
      return difference(memory[2]->read(at, bytes).data(), wanted.data(), bytes);
    });
  }
  section.conclude();
}

/// A rank that does not come: the other's kernel ends by itself, and says for whom it waited.
void a_missing_rank() {
  using collective_cases::Case;
  PullWorld world(2, Options{});
  const Case c{find_algorithm(Collective::all_reduce, "ring"), 2, 1000};
  const Expectation expectation(c);
  const std::string message = world.alone(0, expectation, std::chrono::milliseconds(50));
  if (message.find("for rank 1") == std::string::npos) {
    throw DeviceError("a kernel that waits in vain must say for whom, and there is: " + message);
  }
}

}  // namespace

void kernels(const Options& options) {
  attempt("reductions", [&] { reductions(options); });
  attempt("a missing rank", a_missing_rank);
  attempt("sum of more than 4 GiB", [&] { beyond_32_bits(options); });
}

}  // namespace gpu_check
