// Kernels for any processor, on 16-byte vectors, which SSE2 and NEON have and any other target's compiler imitates.

// On aarch64 a product and a sum would otherwise become one fma, which rounds differently from the other levels.
#if defined(__clang__)
#pragma clang fp contract(off)
#else
#pragma GCC optimize("fp-contract=off")
#endif

#include "reduce/kernels.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace ringlet {
namespace {

struct Portable {
  static constexpr int kBytes = 16;
  using Word = Vector<uint32_t, kBytes>;
  using Float = Vector<float, kBytes>;

  static Word load_part(const std::byte* p, size_t bytes) { return (Word)load_up_to_16(p, bytes); }
  static void store_part(std::byte* p, Word words, size_t bytes) { store_up_to_15(p, (Half16)words, bytes); }

#if defined(__SSE2__)
  static void stream(std::byte* p, Word words) { _mm_stream_si128(reinterpret_cast<__m128i*>(p), (__m128i)words); }
  static void fence() { _mm_sfence(); }
#else
  static void stream(std::byte* p, Word words) { write(p, words); }
  static void fence() {}
#endif
  static void own(const std::byte* p) { __builtin_prefetch(p, 1); }
  static void demote(std::byte*) {}

#if defined(__aarch64__)
  static void widen_half(Word words, Float* values) {
    const auto halves = (float16x8_t)words;
    values[0] = vcvt_f32_f16(vget_low_f16(halves));
    values[1] = vcvt_f32_f16(vget_high_f16(halves));
  }
  static Word narrow_half(const Float* values) {
    const auto half = [](Float value) { return vcvt_f16_f32((float32x4_t)canonical<Portable>(value)); };
    return (Word)vcombine_f16(half(values[0]), half(values[1]));
  }
#else
  static void widen_half(Word words, Float* values) {
    values[0] = widen<Portable, kHalf>(words & 0xffffu);
    values[1] = widen<Portable, kHalf>(words >> 16);
  }
  static Word narrow_half(const Float* values) {
    return narrow<Portable, kHalf>(values[0]) | narrow<Portable, kHalf>(values[1]) << 16;
  }
#endif
};

}  // namespace

const Level& portable_level() noexcept {
  static constexpr Level kLevel = {"portable", find_kernel<Portable>, copy<Portable>};
  return kLevel;
}

}  // namespace ringlet
