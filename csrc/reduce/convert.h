// Conversions between float32 and the 16-bit and 8-bit floats, on vectors.
//
// Contract: widening is exact; narrowing rounds to nearest even, as torch 2.13 does: float8_e4m3fn saturates at 448
// (infinity too), float8_e5m2, float16 and bfloat16 overflow to infinity. Any NaN narrows to one NaN, see level.h. Each
// narrow value is in the low bits of a 32-bit lane. No intermediate value is a float32 denormal, so a thread that
// flushes denormals (torch.set_flush_denormal) still reads float16 and float8 exactly.
#pragma once

#include "reduce/vector.h"

namespace ringlet {
namespace {

inline constexpr uint32_t kFloatNan = 0x7fc00000;
inline constexpr uint32_t kFloatInfinity = 0x7f800000;

/// A small float with an implicit leading one. `overflow` is the first float32 magnitude that becomes `above`.
struct SmallFloat {
  int mantissa_bits;
  int bias;
  uint32_t sign;
  uint32_t nan;
  uint32_t above;
  uint32_t overflow;
};
inline constexpr SmallFloat kHalf = {10, 15, 0x8000, 0x7e00, 0x7c00, (127 + 16) << 23};
inline constexpr SmallFloat kE5m2 = {2, 15, 0x80, 0x7f, 0x7c, (127 + 16) << 23};
// 464 lies halfway between 448 and what would be 480; the tie goes to the even 448, so all from 464 on is 448 = 0x7e.
inline constexpr SmallFloat kE4m3fn = {3, 7, 0x80, 0x7f, 0x7e, 0x43e80000};

template <class Machine, const SmallFloat& kType>
inline Floats<Machine> widen(Words<Machine> bits) {
  constexpr int kShift = 23 - kType.mantissa_bits;
  constexpr uint32_t kRebias = static_cast<uint32_t>(127 - kType.bias) << 23;
  constexpr uint32_t kSmallest = kRebias + (1u << 23);  // the smallest normal number
  const Words<Machine> magnitude = bits & (kType.sign - 1);
  const Words<Machine> shifted = magnitude << kShift;
  // A denormal m becomes (smallest + m) - smallest, which is exact.
  const Floats<Machine> smallest = (Floats<Machine>)(Words<Machine>{} + kSmallest);
  const Words<Machine> denormal = (Words<Machine>)((Floats<Machine>)(shifted + kSmallest) - smallest);
  Words<Machine> result = magnitude < (1u << kType.mantissa_bits) ? denormal : shifted + kRebias;
  if constexpr (kType.above == 0x7e) {  // no infinity: only the last code is special
    result = magnitude == kType.nan ? (Words<Machine>{} + kFloatNan) : result;
  } else {
    result = magnitude >= kType.above ? (shifted | kFloatInfinity) : result;
  }
  return (Floats<Machine>)(result | (bits & kType.sign) << __builtin_clz(kType.sign));
}

template <class Machine, const SmallFloat& kType>
inline Words<Machine> narrow(Floats<Machine> value) {
  constexpr int kShift = 23 - kType.mantissa_bits;
  constexpr uint32_t kRebias = static_cast<uint32_t>(127 - kType.bias) << 23;
  // Adding this power of two puts the small type's last denormal bit at float32's last bit; the hardware rounds.
  constexpr uint32_t kAligner = static_cast<uint32_t>(127 - kType.bias + kShift + 1) << 23;
  const Words<Machine> bits = (Words<Machine>)value;
  const Words<Machine> magnitude = bits & 0x7fffffffu;
  const Floats<Machine> aligner = (Floats<Machine>)(Words<Machine>{} + kAligner);
  const Words<Machine> denormal = (Words<Machine>)((Floats<Machine>)magnitude + aligner) - kAligner;
  const Words<Machine> odd = (magnitude >> kShift) & 1u;
  Words<Machine> result = (magnitude - kRebias + ((1u << (kShift - 1)) - 1) + odd) >> kShift;
  result = magnitude < kRebias + (1u << 23) ? denormal : result;
  result = magnitude >= kType.overflow ? (Words<Machine>{} + kType.above) : result;
  result |= (bits >> 31) << __builtin_ctz(kType.sign);
  return magnitude > kFloatInfinity ? (Words<Machine>{} + kType.nan) : result;
}

/// float32's bits with every NaN made the one NaN.
template <class Machine>
inline Words<Machine> canonical(Floats<Machine> value) {
  return value == value ? (Words<Machine>)value : (Words<Machine>{} + kFloatNan);
}

/// bfloat16 in the upper half of each lane; the lower half is garbage.
template <class Machine>
inline Words<Machine> round_to_upper_half(Floats<Machine> value) {
  const Words<Machine> bits = canonical<Machine>(value);
  return bits + 0x7fffu + ((bits >> 16) & 1u);
}

}  // namespace
}  // namespace ringlet
