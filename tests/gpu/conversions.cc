// Rounding and casts of the small floats: all codes of each, what lies between them, and random float32.
//
// The device converts float16 by its own instructions, which no host test can run; this is what they must agree with.
#include "conversions.h"

#include <cmath>

#include "arena.h"
#include "reduce_cases.h"

using namespace reduce_reference;

namespace gpu_check {
namespace {

struct Small {
  DType dtype;
  Format format;
  int codes() const { return 1 << (8 * static_cast<int>(element_size(dtype))); }
};
constexpr Small kSmall[] = {{DType::float16, kFloat16},
                            {DType::bfloat16, kBFloat16},
                            {DType::float8_e4m3fn, kE4m3fn},
                            {DType::float8_e5m2, kE5m2}};

void put_code(const Small& small, Bytes& bytes, size_t i, int code) {
  if (element_size(small.dtype) == 1) {
    put(bytes, i, static_cast<uint8_t>(code));
  } else {
    put(bytes, i, static_cast<uint16_t>(code));
  }
}

Bytes all_codes(const Small& small) {
  Bytes codes(static_cast<size_t>(small.codes()) * element_size(small.dtype));
  for (int code = 0; code < small.codes(); ++code) put_code(small, codes, static_cast<size_t>(code), code);
  return codes;
}

/// Ties between neighbouring codes and what lies next to them, and random bits.
std::vector<float> hard_to_round(const Small& small) {
  std::vector<float> values;
  for (int code = 0; code + 1 < small.codes(); ++code) {
    const double one = decode(small.format, code), next = decode(small.format, code + 1);
    // Past the last finite one there is a tie, too: between it and what would come next.
    const bool last = std::isfinite(one) && !std::isfinite(next);
    const auto tie = static_cast<float>(last ? one + (one - decode(small.format, code - 1)) / 2 : (one + next) / 2);
    for (const float value : {std::nextafter(tie, -INFINITY), tie, std::nextafter(tie, INFINITY)}) {
      values.push_back(value);
    }
  }
  std::mt19937_64 random(7);
  const Bytes bits = random_input(DType::float32, 4001, false, random);
  for (size_t i = 0; i < 4001; ++i) values.push_back(get<float>(bits, i));
  return values;
}

class Conversions {
 public:
  explicit Conversions(Section& section) : section_(section) {}

  /// Every code scaled: ties, denormals, overflow.
  void rounding(const Small& small, float scale) {
    const Bytes codes = all_codes(small);
    Bytes scaled(codes.size());
    for (int code = 0; code < small.codes(); ++code) {
      const auto value = static_cast<float>(decode(small.format, code));
      put_code(small, scaled, static_cast<size_t>(code), encode(small.format, rounded<float>(value * scale)));
    }
    attempt(std::string("every ") + name(small.dtype) + " times " + std::to_string(scale), {codes, 0}, {scaled, 0},
            [&](std::byte* dst, const std::byte* src) {
              ReduceArgs args{.dst = dst, .srcs = &src, .n = 1, .count = static_cast<size_t>(small.codes())};
              args.scaled_source = 0;
              args.scale = scale;
              return device().reduce(&args, small.dtype, ReduceOp::premul_sum, stream_.get());
            });
  }

  void casts(const Small& small, size_t offset) {
    const size_t size = element_size(small.dtype);
    const std::vector<float> values = hard_to_round(small);
    Bytes wide(values.size() * 4), narrowed(values.size() * size);
    for (size_t i = 0; i < values.size(); ++i) {
      put(wide, i, values[i]);
      put_code(small, narrowed, i, encode(small.format, values[i]));
    }
    const Bytes codes = all_codes(small);
    Bytes widened(static_cast<size_t>(small.codes()) * 4);
    for (int code = 0; code < small.codes(); ++code) {
      put(widened, static_cast<size_t>(code), canonical(static_cast<float>(decode(small.format, code))));
    }
    const std::string of = std::string(name(small.dtype)) + ", offset " + std::to_string(offset);
    attempt("float32 to " + of, {wide, 4 * offset}, {narrowed, size * offset},
            [&](std::byte* dst, const std::byte* src) {
              return device().cast(dst, small.dtype, src, DType::float32, values.size(), stream_.get());
            });
    attempt("to float32 from " + of, {codes, size * offset}, {widened, 4 * offset},
            [&](std::byte* dst, const std::byte* src) {
              return device().cast(dst, DType::float32, src, small.dtype, static_cast<size_t>(small.codes()),
                                   stream_.get());
            });
  }

 private:
  /// What is to lie so many bytes past a line.
  struct Side {
    const Bytes& bytes;
    size_t shift;
  };

  template <class Launch>
  void attempt(const std::string& what, const Side& from, const Side& to, Launch launch) {
    if (section_.hopeless()) return;
    section_.attempt(what, [&] {
      arena_.clear();
      const Arena::Piece src = arena_.place(from.bytes.size(), from.shift);
      const Arena::Piece dst = arena_.place(to.bytes.size(), to.shift);
      arena_.expect(src, from.bytes);
      arena_.write(src, dst);
      ok(launch(arena_.address(dst), arena_.address(src)), "launching a conversion");
      stream_.wait();
      arena_.expect(dst, to.bytes);
      return arena_.difference(src, dst);
    });
  }

  Section& section_;
  Stream stream_;
  Arena arena_;
};

}  // namespace

void conversions(const Options& options) {
  Section section("conversions");
  Conversions conversions(section);
  const std::vector<float> few = {0.75f, 0x1.8p-10f};
  const std::vector<float> all = {1.0f, 0.75f, 1.0625f, 1.00390625f, 0x1p-9f, 0x1.8p-10f, 0x1p12f, 1.0009765625f};
  for (const Small& small : kSmall) {
    for (const float scale : options.few ? few : all) conversions.rounding(small, scale);
    if (device().cast == nullptr) continue;
    for (const size_t offset : {size_t{0}, size_t{1}, size_t{3}}) conversions.casts(small, offset);
  }
  if (device().cast == nullptr) say("casts: not on this device");
  section.conclude();
}

}  // namespace gpu_check
