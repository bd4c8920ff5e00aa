// Kernels for x86-64 processors with AVX-512 F, BW, VL and DQ, on 64-byte vectors.

// gcc 12 warns about deliberately undefined registers in its own headers (gcc bug 105593).
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

#include <immintrin.h>

#include "reduce/kernels.h"

namespace ringlet {
namespace {

struct Avx512 {
  static constexpr int kBytes = 64;
  using Word = Vector<uint32_t, kBytes>;
  using Float = Vector<float, kBytes>;

  static __mmask64 first(size_t bytes) { return ~uint64_t{0} >> (64 - bytes); }  // 1 to 64
  static Word load_part(const std::byte* p, size_t bytes) { return (Word)_mm512_maskz_loadu_epi8(first(bytes), p); }
  static void store_part(std::byte* p, Word words, size_t bytes) {
    _mm512_mask_storeu_epi8(p, first(bytes), (__m512i)words);
  }
  static void stream(std::byte* p, Word words) { _mm512_stream_si512(reinterpret_cast<__m512i*>(p), (__m512i)words); }
  static void fence() { _mm_sfence(); }
  static void own(const std::byte* p) { __builtin_prefetch(p, 1); }
  static void demote(std::byte* p) { _cldemote(p); }

  static void widen_half(Word words, Float* values) {
    values[0] = _mm512_cvtph_ps(_mm512_castsi512_si256((__m512i)words));
    values[1] = _mm512_cvtph_ps(_mm512_extracti64x4_epi64((__m512i)words, 1));
  }
  static Word narrow_half(const Float* values) {
    const auto half = [](Float value) {
      return _mm512_cvtps_ph((__m512)canonical<Avx512>(value), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    };
    return (Word)_mm512_inserti64x4(_mm512_castsi256_si512(half(values[0])), half(values[1]), 1);
  }
};

}  // namespace

const Level& avx512_level() noexcept {
  static constexpr Level kLevel = {"avx512", find_kernel<Avx512>, copy<Avx512>};
  return kLevel;
}

}  // namespace ringlet
