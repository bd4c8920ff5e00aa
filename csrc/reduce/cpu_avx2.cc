// Kernels for x86-64 processors with AVX2 and F16C, on 32-byte vectors.
#include <immintrin.h>

#include "reduce/kernels.h"

namespace ringlet {
namespace {

struct Avx2 {
  static constexpr int kBytes = 32;
  using Word = Vector<uint32_t, kBytes>;
  using Float = Vector<float, kBytes>;

  static Word load_part(const std::byte* p, size_t bytes) {
    const bool upper = bytes >= 16;
    const auto low = (__m128i)load_up_to_16(p, upper ? 16 : bytes);
    const auto high = (__m128i)load_up_to_16(p + (upper ? 16 : 0), upper ? bytes - 16 : 0);
    return (Word)_mm256_set_m128i(high, low);
  }
  static void store_part(std::byte* p, Word words, size_t bytes) {
    auto rest = _mm256_castsi256_si128((__m256i)words);
    if (bytes >= 16) {
      write(p, rest);
      rest = _mm256_extracti128_si256((__m256i)words, 1);
      p += 16;
      bytes -= 16;
    }
    store_up_to_15(p, (Half16)rest, bytes);
  }
  static void stream(std::byte* p, Word words) { _mm256_stream_si256(reinterpret_cast<__m256i*>(p), (__m256i)words); }
  static void fence() { _mm_sfence(); }
  static void own(const std::byte* p) { __builtin_prefetch(p, 1); }
  static void demote(std::byte* p) { _cldemote(p); }

  static void widen_half(Word words, Float* values) {
    values[0] = _mm256_cvtph_ps(_mm256_castsi256_si128((__m256i)words));
    values[1] = _mm256_cvtph_ps(_mm256_extracti128_si256((__m256i)words, 1));
  }
  static Word narrow_half(const Float* values) {
    const auto half = [](Float value) {
      return _mm256_cvtps_ph((__m256)canonical<Avx2>(value), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    };
    return (Word)_mm256_set_m128i(half(values[1]), half(values[0]));
  }
};

}  // namespace

const Level& avx2_level() noexcept {
  static constexpr Level kLevel = {"avx2", find_kernel<Avx2>, copy<Avx2>};
  return kLevel;
}

}  // namespace ringlet
