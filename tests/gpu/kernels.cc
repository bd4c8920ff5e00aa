// The device's reductions against the scalar reference, byte for byte: every dtype and operation, packs and edges,
// addresses that agree by 16 and that do not, in place and not, with guards; and one of more bytes than 32 bits count.
#include <algorithm>
#include <memory>

#include "arena.h"
#include "conversions.h"
#include "pull_world.h"
#include "reduce_cases.h"

using namespace reduce_reference;

namespace gpu_check {
namespace {

enum Mode { kInPlace, kSeparate, kSecond, kModes };

/// Of the random inputs: odd and prime, so that no error in an address that a power of two explains hides in a
/// repetition.
constexpr size_t kPeriod = 1531;
constexpr size_t kLarge = 100003;

/// An element's scalars, which its address is a multiple of.
size_t alignment(DType dtype) { return element_size(dtype) / (is_complex(dtype) ? 2 : 1); }

/// What one operation makes of the first n inputs.
struct Wanted {
  ReduceOp op;
  Finish finish;
  Bytes result;  // of kPeriod elements
};

/// Where inputs and outputs lie.
struct Shape {
  int n;
  size_t count;
  size_t offset;  // of everything, in bytes past a line ...
  size_t apart;   // ... and how much further each source lies
};

class Reductions {
 public:
  explicit Reductions(const Options& options) : options_(options) {}

  void all_of(Section& section, DType dtype, bool tame) {
    section_ = &section;
    const std::vector<int> sources = options_.few ? std::vector{1, 2, 3} : std::vector{1, 2, 3, 8};
    draw(dtype, sources.back(), tame);
    for (const int n : sources) {
      std::vector<Wanted> wanted;
      for (int o = 0; o < kReduceOps; ++o) add_wanted(static_cast<ReduceOp>(o), n, wanted);
      for (const Shape& shape : shapes(n, tame)) in_shape(shape, wanted);
    }
  }

  /// As many sources as a kernel takes.
  void most_sources(Section& section) {
    section_ = &section;
    draw(DType::float32, device().most_sources, /*tame=*/true);
    std::vector<Wanted> wanted;
    const std::vector<Bytes> srcs(inputs_.begin(), inputs_.end());
    wanted.push_back({ReduceOp::sum, {}, reference(dtype_, ReduceOp::sum, srcs, {})});
    for (const size_t count : {size_t{64}, kPeriod}) in_shape({device().most_sources, count, 0, 0}, wanted);
    in_shape({device().most_sources, kPeriod, 4, 4}, wanted);
  }

 private:
  void draw(DType dtype, int n, bool tame) {
    dtype_ = dtype;
    inputs_.clear();
    for (int i = 0; i < n; ++i) inputs_.push_back(random_input(dtype, kPeriod, tame, random_));
  }

  void add_wanted(ReduceOp op, int n, std::vector<Wanted>& wanted) const {
    if (!supports(dtype_, op)) return;
    const std::vector<Bytes> srcs(inputs_.begin(), inputs_.begin() + n);
    for (const Finish& finish : finishes(op, n)) wanted.push_back({op, finish, reference(dtype_, op, srcs, finish)});
  }

  std::vector<Shape> shapes(int n, bool tame) const {
    const size_t unit = alignment(dtype_);
    if (options_.few) return {{n, 1, 0, 0}, {n, kPeriod, 0, 0}, {n, kPeriod, unit, unit}};
    std::vector<Shape> all;
    for (const size_t count : {size_t{1}, size_t{64}, kPeriod, kLarge}) {
      if (count == kLarge && (n > 3 || tame)) continue;
      for (const size_t offset : {size_t{0}, unit}) {
        for (const size_t apart : {size_t{0}, unit}) all.push_back({n, count, offset, apart});
      }
    }
    return all;
  }

  /// The sources are brought to the device once, and looked at again when all is done.
  void in_shape(const Shape& shape, const std::vector<Wanted>& wanted) {
    if (section_->hopeless()) return;
    const size_t bytes = shape.count * element_size(dtype_);
    arena_.clear();
    sources_.clear();
    for (size_t i = 0; i < static_cast<size_t>(shape.n); ++i) {
      sources_.push_back(arena_.place(bytes, shape.offset + shape.apart * i));
      arena_.expect(sources_.back(), inputs_[i]);
    }
    outputs_[0] = arena_.place(bytes, shape.offset);
    outputs_[1] = arena_.place(bytes, shape.offset);
    const std::string of = std::string(name(dtype_)) + " n=" + std::to_string(shape.n) +
                           " count=" + std::to_string(shape.count) + " offset=" + std::to_string(shape.offset) +
                           " apart=" + std::to_string(shape.apart);
    section_->attempt(of + ": sources", [&] {
      arena_.write(sources_.front(), outputs_[1]);
      for (const Wanted& one : wanted) {
        // One way for each of the longest, whose copies to and from the host take longer than all else.
        const bool one_mode = options_.few || shape.count == kLarge;
        for (int mode = 0; mode < kModes; ++mode) {
          if (!one_mode || mode == turn_ % kModes) one_case(shape, one, static_cast<Mode>(mode), of);
        }
        ++turn_;
      }
      return arena_.difference(sources_.front(), sources_.back());
    });
  }

  void one_case(const Shape& shape, const Wanted& one, Mode mode, const std::string& of) {
    if (section_->hopeless()) return;
    const std::string what = of + " " + name(one.op) + " mode=" + std::to_string(mode) +
                             " divisor=" + std::to_string(one.finish.divisor) +
                             " scaled=" + std::to_string(one.finish.scaled_source);
    section_->attempt(what, [&] { return run(shape, one, mode); });
  }

  std::string run(const Shape& shape, const Wanted& one, Mode mode) {
    const size_t own = shape.count % static_cast<size_t>(shape.n);
    const Arena::Piece& result = mode == kInPlace ? sources_[own] : outputs_[0];
    for (const Arena::Piece& output : outputs_) arena_.expect_nothing(output);
    arena_.write(outputs_[0], outputs_[1]);
    std::vector<const std::byte*> srcs;
    for (const Arena::Piece& source : sources_) srcs.push_back(arena_.address(source));
    ReduceArgs args{.dst = arena_.address(result), .srcs = srcs.data(), .n = shape.n, .count = shape.count};
    args.dst2 = mode == kSecond ? arena_.address(outputs_[1]) : nullptr;
    args.scaled_source = one.finish.scaled_source;
    args.scale = one.finish.scale;
    args.divisor = one.finish.divisor;
    ok(device().reduce(&args, dtype_, one.op, stream_.get()), "launching a reduction");
    stream_.wait();
    arena_.expect(result, one.result);
    if (mode == kSecond) arena_.expect(outputs_[1], one.result);
    std::string wrong = arena_.difference(outputs_[0], outputs_[1]);
    if (mode == kInPlace) {
      if (wrong.empty()) wrong = arena_.difference(result, result);
      arena_.expect(result, inputs_[own]);
      arena_.write(result, result);
    }
    return wrong;
  }

  Section* section_ = nullptr;  // of the dtype
  const Options options_;
  Stream stream_;
  Arena arena_;
  std::mt19937_64 random_{1};
  DType dtype_ = DType::float32;
  std::vector<Bytes> inputs_;
  std::vector<Arena::Piece> sources_;
  Arena::Piece outputs_[2];
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
  const Bytes poison(1 << 20, Arena::kFill);
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
  attempt("conversions", [&] { conversions(options); });
  attempt("a missing rank", a_missing_rank);
  attempt("sum of more than 4 GiB", [&] { beyond_32_bits(options); });
}

}  // namespace gpu_check
