// Element types and operations on single values, for the GPU: the same bits as reduce/elements.h gives on vectors.
//
// An element type E has Bits (how it lies in memory), Value (what it computes in), widen and narrow. float16, bfloat16
// and float8 compute in float32. A computed NaN is one NaN, min(-0, +0) is -0: see reduce/level.h.
// The host compiles all of it too, and tests/cpp/reduce_test.cc runs it there against the reference; only float16's
// conversions are the device's own instructions on the device. No product may fuse with a sum: --fmad=false.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "base/dtype.h"

#if defined(__CUDACC__)
#define RINGLET_BOTH __host__ __device__ __forceinline__
#define RINGLET_UNROLL _Pragma("unroll")  // or arrays would lie in memory, not in registers
#else
#define RINGLET_BOTH inline
#define RINGLET_UNROLL
#endif

namespace ringlet::cuda {

template <class To, class From>
RINGLET_BOTH To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

/// Tensors lie in global memory; where the compiler cannot see that, it would load and store more slowly.
template <class T>
RINGLET_BOTH T* global(T* address) {
#if defined(__CUDA_ARCH__)
  __builtin_assume(__isGlobal(address));
#endif
  return address;
}

inline constexpr uint32_t kFloatInfinity = 0x7f800000;
inline constexpr uint32_t kFloatNan = 0x7fc00000;

/// Small floats as reduce/convert.h describes them: `overflow` is the first float32 magnitude that becomes `above`.
struct HalfFormat {
  static constexpr int kMantissaBits = 10, kBias = 15;
  static constexpr uint32_t kSign = 0x8000, kNan = 0x7e00, kAbove = 0x7c00, kOverflow = (127 + 16) << 23;
  static constexpr bool kHasInfinity = true;
};
struct E5m2Format {
  static constexpr int kMantissaBits = 2, kBias = 15;
  static constexpr uint32_t kSign = 0x80, kNan = 0x7f, kAbove = 0x7c, kOverflow = (127 + 16) << 23;
  static constexpr bool kHasInfinity = true;
};
struct E4m3fnFormat {
  static constexpr int kMantissaBits = 3, kBias = 7;
  static constexpr uint32_t kSign = 0x80, kNan = 0x7f, kAbove = 0x7e, kOverflow = 0x43e80000;
  static constexpr bool kHasInfinity = false;
};

template <class Format>
RINGLET_BOTH float widen(uint32_t bits) {
  constexpr int kShift = 23 - Format::kMantissaBits;
  constexpr uint32_t kRebias = static_cast<uint32_t>(127 - Format::kBias) << 23;
  constexpr uint32_t kSmallest = kRebias + (1u << 23);  // the smallest normal number
  const uint32_t magnitude = bits & (Format::kSign - 1);
  const uint32_t shifted = magnitude << kShift;
  uint32_t result = shifted + kRebias;
  // A denormal m becomes (smallest + m) - smallest, which is exact.
  if (magnitude < (1u << Format::kMantissaBits)) {
    result = bits_as<uint32_t>(bits_as<float>(shifted + kSmallest) - bits_as<float>(kSmallest));
  }
  if (Format::kHasInfinity && magnitude >= Format::kAbove) result = shifted | kFloatInfinity;
  if (!Format::kHasInfinity && magnitude == Format::kNan) result = kFloatNan;
  return bits_as<float>(result | (bits & Format::kSign) * (0x80000000u / Format::kSign));
}

template <class Format>
RINGLET_BOTH uint32_t narrow(float value) {
  constexpr int kShift = 23 - Format::kMantissaBits;
  constexpr uint32_t kRebias = static_cast<uint32_t>(127 - Format::kBias) << 23;
  // Adding this power of two puts the small type's last denormal bit at float32's last bit; the hardware rounds.
  constexpr uint32_t kAligner = static_cast<uint32_t>(127 - Format::kBias + kShift + 1) << 23;
  const uint32_t bits = bits_as<uint32_t>(value);
  const uint32_t magnitude = bits & 0x7fffffffu;
  const uint32_t odd = (magnitude >> kShift) & 1u;
  uint32_t result = (magnitude - kRebias + ((1u << (kShift - 1)) - 1) + odd) >> kShift;
  if (magnitude < kRebias + (1u << 23)) {
    result = bits_as<uint32_t>(bits_as<float>(magnitude) + bits_as<float>(kAligner)) - kAligner;
  }
  if (magnitude >= Format::kOverflow) result = Format::kAbove;
  result |= (bits >> 31) * Format::kSign;
  return magnitude > kFloatInfinity ? Format::kNan : result;
}

struct Float64 {
  using Bits = uint64_t;
  using Value = double;
  static RINGLET_BOTH Value widen(Bits bits) { return bits_as<Value>(bits); }
  static RINGLET_BOTH Bits narrow(Value value) {
    return value == value ? bits_as<Bits>(value) : Bits{0x7ff8000000000000u};
  }
};

struct Float32 {
  using Bits = uint32_t;
  using Value = float;
  static RINGLET_BOTH Value widen(Bits bits) { return bits_as<Value>(bits); }
  static RINGLET_BOTH Bits narrow(Value value) { return value == value ? bits_as<Bits>(value) : kFloatNan; }
};

struct BFloat16 {
  using Bits = uint16_t;
  using Value = float;
  static RINGLET_BOTH Value widen(Bits bits) { return bits_as<Value>(static_cast<uint32_t>(bits) << 16); }
  static RINGLET_BOTH Bits narrow(Value value) {
    const uint32_t bits = Float32::narrow(value);
    return static_cast<Bits>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
  }
};

struct Float16 {
  using Bits = uint16_t;
  using Value = float;
#if defined(__CUDA_ARCH__)
  static RINGLET_BOTH Value widen(Bits bits) {
    Value value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
  }
  static RINGLET_BOTH Bits narrow(Value value) {
    Bits bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return value == value ? bits : static_cast<Bits>(HalfFormat::kNan);  // the instruction's NaN is 0x7fff
  }
#else
  static RINGLET_BOTH Value widen(Bits bits) { return cuda::widen<HalfFormat>(bits); }
  static RINGLET_BOTH Bits narrow(Value value) { return static_cast<Bits>(cuda::narrow<HalfFormat>(value)); }
#endif
};

template <class Format>
struct Float8 {
  using Bits = uint8_t;
  using Value = float;
  static RINGLET_BOTH Value widen(Bits bits) { return cuda::widen<Format>(bits); }
  static RINGLET_BOTH Bits narrow(Value value) { return static_cast<Bits>(cuda::narrow<Format>(value)); }
};

/// Values are unsigned, so that sums and products wrap; T is what comparisons and divisions see.
template <class T>
struct Integer {
  using Bits = std::make_unsigned_t<T>;
  using Value = Bits;
  using Ordered = T;
  static RINGLET_BOTH Value widen(Bits bits) { return bits; }
  static RINGLET_BOTH Bits narrow(Value value) { return value; }
};

/// Only its product needs this; a sum of complex numbers is one of twice as many reals.
template <class Real>
struct Complex {
  struct Bits {
    typename Real::Bits re, im;
  };
  struct Value {
    typename Real::Value re, im;
  };
  static RINGLET_BOTH Value widen(Bits bits) { return {Real::widen(bits.re), Real::widen(bits.im)}; }
  static RINGLET_BOTH Bits narrow(Value value) { return {Real::narrow(value.re), Real::narrow(value.im)}; }
};

template <class E>
inline constexpr bool kIsInteger = false;
template <class T>
inline constexpr bool kIsInteger<Integer<T>> = true;
template <class E>
inline constexpr bool kIsComplex = false;
template <class Real>
inline constexpr bool kIsComplex<Complex<Real>> = true;

// An operation on two values; what a kernel is compiled for is one of the three sets of them below.
struct Sum {
  template <class E, class V>
  static RINGLET_BOTH V apply(V a, V b) {
    return static_cast<V>(a + b);
  }
};

struct Product {
  template <class E, class V>
  static RINGLET_BOTH V apply(V a, V b) {
    if constexpr (kIsComplex<E>) {
      return {a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re};
    } else if constexpr (kIsInteger<E>) {
      return static_cast<V>(uint64_t{a} * b);  // 16-bit values would be promoted to int, which may not overflow
    } else {
      return a * b;
    }
  }
};

/// Of two floats that are neither less nor greater the bits' union is right for Min: equal numbers are their own union,
/// of -0 and +0 it is -0, and with a NaN among them it is a NaN. Max wants +0.
template <bool kPositive, class V>
RINGLET_BOTH V united(V a, V b) {
  using Bits = std::conditional_t<sizeof(V) == 4, uint32_t, uint64_t>;
  constexpr Bits kSign = Bits{1} << (8 * sizeof(V) - 1);
  const Bits x = bits_as<Bits>(a), y = bits_as<Bits>(b);
  return bits_as<V>(kPositive ? (x | y) ^ ((x ^ y) & kSign) : x | y);
}

struct Min {
  template <class E, class V>
  static RINGLET_BOTH V apply(V a, V b) {
    if constexpr (kIsInteger<E>) {
      return static_cast<typename E::Ordered>(a) < static_cast<typename E::Ordered>(b) ? a : b;
    } else {
      return a < b ? a : (b < a ? b : united<false>(a, b));
    }
  }
};

struct Max {
  template <class E, class V>
  static RINGLET_BOTH V apply(V a, V b) {
    if constexpr (kIsInteger<E>) {
      return static_cast<typename E::Ordered>(a) > static_cast<typename E::Ordered>(b) ? a : b;
    } else {
      return a > b ? a : (b > a ? b : united<true>(a, b));
    }
  }
};

struct And {
  template <class E, class V>
  static RINGLET_BOTH V apply(V a, V b) {
    return a & b;
  }
};

struct Or {
  template <class E, class V>
  static RINGLET_BOTH V apply(V a, V b) {
    return a | b;
  }
};

struct Xor {
  template <class E, class V>
  static RINGLET_BOTH V apply(V a, V b) {
    return a ^ b;
  }
};

// What kernels are compiled for. which() calls `act` with the operation that `op` means among them: all threads take the
// same branch, and the sums of floats, which count most, have none. kLinear: sums, which may be scaled and divided, are
// among them. kBitwise: whole words of memory can be taken, whatever they are made of.

struct Sums {
  static constexpr bool kLinear = true, kBitwise = false;
  template <class Act>
  static RINGLET_BOTH void which(ReduceOp, const Act& act) {
    act(Sum());
  }
};

struct Products {
  static constexpr bool kLinear = false, kBitwise = false;
  template <class Act>
  static RINGLET_BOTH void which(ReduceOp, const Act& act) {
    act(Product());
  }
};

struct Arithmetic {
  static constexpr bool kLinear = true, kBitwise = false;
  template <class Act>
  static RINGLET_BOTH void which(ReduceOp op, const Act& act) {
    switch (op) {
      case ReduceOp::product: return act(Product());
      case ReduceOp::min: return act(Min());
      case ReduceOp::max: return act(Max());
      default: return act(Sum());
    }
  }
};

/// Those of integers' bits; and all of booleans, which are bytes of 0 or 1.
struct Bitwise {
  static constexpr bool kLinear = false, kBitwise = true;
  template <class Act>
  static RINGLET_BOTH void which(ReduceOp op, const Act& act) {
    switch (op) {
      case ReduceOp::bxor: return act(Xor());
      case ReduceOp::band:
      case ReduceOp::product:
      case ReduceOp::min: return act(And());
      default: return act(Or());
    }
  }
};

}  // namespace ringlet::cuda
