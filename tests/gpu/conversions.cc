// Rounding of the small floats: all codes of each, scaled.
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
  }
  section.conclude();
}

}  // namespace gpu_check
