// Element types and operations on vectors: they unpack a vector of memory into values, and pack values into memory.
//
// An element type E has kSize (bytes), Value (a vector to compute in) and kParts: a word of memory holds the elements
// of kParts values, split so that unpacking needs shifts only: lane l of part p is element l * kParts + p.
// float16, bfloat16 and float8 compute in float32; complex sums are sums of pairs (see as_pairs in kernels.h).
#pragma once

#include <type_traits>

#include "reduce/convert.h"

namespace ringlet {
namespace {

template <class Machine>
struct Float32 {
  using Value = Floats<Machine>;
  using Bits = Words<Machine>;
  static constexpr int kSize = 4, kParts = 1;
  static void unpack(Words<Machine> words, Value* values) { values[0] = (Value)words; }
  static Words<Machine> pack(const Value* values) { return canonical<Machine>(values[0]); }
};

template <class Machine>
struct Float64 {
  using Value = Vector<double, Machine::kBytes>;
  using Bits = Vector<uint64_t, Machine::kBytes>;
  static constexpr int kSize = 8, kParts = 1;
  static void unpack(Words<Machine> words, Value* values) { values[0] = (Value)words; }
  static Words<Machine> pack(const Value* values) {
    const Bits nan = Bits{} + 0x7ff8000000000000u;
    return (Words<Machine>)(values[0] == values[0] ? (Bits)values[0] : nan);
  }
};

template <class Machine>
struct BFloat16 {
  using Value = Floats<Machine>;
  using Bits = Words<Machine>;
  static constexpr int kSize = 2, kParts = 2;
  static void unpack(Words<Machine> words, Value* values) {
    values[0] = (Value)(words << 16);
    values[1] = (Value)(words & 0xffff0000u);
  }
  static Words<Machine> pack(const Value* values) {
    return round_to_upper_half<Machine>(values[0]) >> 16 | (round_to_upper_half<Machine>(values[1]) & 0xffff0000u);
  }
};

/// The two parts are the machine's choice: its own conversions want halves, ours want odd and even elements.
template <class Machine>
struct Float16 {
  using Value = Floats<Machine>;
  using Bits = Words<Machine>;
  static constexpr int kSize = 2, kParts = 2;
  static void unpack(Words<Machine> words, Value* values) { Machine::widen_half(words, values); }
  static Words<Machine> pack(const Value* values) { return Machine::narrow_half(values); }
};

template <class Machine, const SmallFloat& kType>
struct Float8 {
  using Value = Floats<Machine>;
  using Bits = Words<Machine>;
  static constexpr int kSize = 1, kParts = 4;
  static void unpack(Words<Machine> words, Value* values) {
    for (int i = 0; i < 4; ++i) values[i] = widen<Machine, kType>(words >> (8 * i) & 0xffu);
  }
  static Words<Machine> pack(const Value* values) {
    Words<Machine> words{};
    for (int i = 0; i < 4; ++i) words |= narrow<Machine, kType>(values[i]) << (8 * i);
    return words;
  }
};

/// Values are unsigned, so that sums and products wrap. Comparisons and divisions use Ordered.
template <class Machine, class T>
struct Integer {
  using Value = Vector<std::make_unsigned_t<T>, Machine::kBytes>;
  using Bits = Value;
  using Ordered = Vector<T, Machine::kBytes>;
  static constexpr int kSize = sizeof(T), kParts = 1;
  static void unpack(Words<Machine> words, Value* values) { values[0] = (Value)words; }
  static Words<Machine> pack(const Value* values) { return (Words<Machine>)values[0]; }
};

template <class Machine, class T>
struct Complex {
  using Value = Vector<T, Machine::kBytes>;
  using Bits = std::conditional_t<sizeof(T) == 4, Words<Machine>, Vector<uint64_t, Machine::kBytes>>;
  using Reals = std::conditional_t<sizeof(T) == 4, Float32<Machine>, Float64<Machine>>;
  static constexpr int kSize = 2 * sizeof(T), kParts = 1;
  static void unpack(Words<Machine> words, Value* values) { Reals::unpack(words, values); }
  static Words<Machine> pack(const Value* values) { return Reals::pack(values); }
};

template <class E>
inline constexpr bool kIsInteger = false;
template <class Machine, class T>
inline constexpr bool kIsInteger<Integer<Machine, T>> = true;
template <class E>
inline constexpr bool kIsComplex = false;
template <class Machine, class T>
inline constexpr bool kIsComplex<Complex<Machine, T>> = true;

struct Sum {
  template <class E, class V>
  static V apply(V a, V b) {
    return a + b;
  }
};

/// (a + bi)(c + di) = (ac - bd) + (ad + bc)i, each product rounded.
template <class E, class V>
inline V complex_product(V x, V y) {
  V real{}, imaginary{}, crossed{};
  typename E::Bits negative{};
#pragma GCC unroll 16
  for (size_t i = 0; i < sizeof(V) / sizeof(x[0]); i += 2) {  // compilers make permutations of this
    real[i] = real[i + 1] = x[i];
    imaginary[i] = imaginary[i + 1] = x[i + 1];
    crossed[i] = y[i + 1];
    crossed[i + 1] = y[i];
    negative[i] = decltype(negative[0] + 0u){1} << (8 * sizeof(x[0]) - 1);
  }
  return real * y + (V)((typename E::Bits)(imaginary * crossed) ^ negative);
}

struct Product {
  template <class E, class V>
  static V apply(V a, V b) {
    if constexpr (kIsComplex<E>) {
      return complex_product<E>(a, b);
    } else {
      return a * b;
    }
  }
};

/// If neither of two floats is less, the union of their bits is right in all cases: equal numbers are their own union,
/// the union of -0 and +0 is -0, and the union with a NaN is a NaN.
struct Min {
  template <class E, class V>
  static V apply(V a, V b) {
    if constexpr (kIsInteger<E>) {
      return (typename E::Ordered)a < (typename E::Ordered)b ? a : b;
    } else {
      return a < b ? a : (b < a ? b : (V)((typename E::Bits)a | (typename E::Bits)b));
    }
  }
};

struct Max {
  template <class E, class V>
  static V apply(V a, V b) {
    if constexpr (kIsInteger<E>) {
      return (typename E::Ordered)a > (typename E::Ordered)b ? a : b;
    } else {
      return -Min::apply<E>(-a, -b);
    }
  }
};

struct And {
  template <class E, class V>
  static V apply(V a, V b) {
    return a & b;
  }
};
struct Or {
  template <class E, class V>
  static V apply(V a, V b) {
    return a | b;
  }
};
struct Xor {
  template <class E, class V>
  static V apply(V a, V b) {
    return a ^ b;
  }
};

}  // namespace
}  // namespace ringlet
