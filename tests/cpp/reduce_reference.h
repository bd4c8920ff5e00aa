// A scalar reference for reductions that shares no code with the kernels.
//
// Small floats are decoded and encoded by arithmetic on doubles (never by bit tricks); results round through volatile,
// so that no compiler can fuse a product into a sum. float8_e4m3fn saturates and computed NaNs are one NaN: see
// reduce/level.h.
// Thread safety: pure functions.
#pragma once

#include <algorithm>
#include <cmath>
#include <complex>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

#include "base/dtype.h"

namespace reduce_reference {

using ringlet::DType;
using ringlet::ReduceOp;

using Bytes = std::vector<std::byte>;

struct Format {
  int exponent_bits, mantissa_bits, nan;
  bool saturates;
};
inline constexpr Format kFloat16 = {5, 10, 0x7e00, false}, kBFloat16 = {8, 7, 0x7fc0, false};
inline constexpr Format kE4m3fn = {4, 3, 0x7f, true}, kE5m2 = {5, 2, 0x7f, false};

inline double decode(const Format& f, int code) {
  const int sign_bit = 1 << (f.exponent_bits + f.mantissa_bits);
  const int exponent = (code & (sign_bit - 1)) >> f.mantissa_bits;
  const int mantissa = code & ((1 << f.mantissa_bits) - 1);
  const int bias = (1 << (f.exponent_bits - 1)) - 1;
  const int last = (1 << f.exponent_bits) - 1;
  double value;
  if (f.saturates ? (code & (sign_bit - 1)) == sign_bit - 1 : exponent == last && mantissa != 0) return NAN;
  if (!f.saturates && exponent == last) {
    value = INFINITY;
  } else if (exponent == 0) {
    value = std::ldexp(mantissa, 1 - bias - f.mantissa_bits);
  } else {
    value = std::ldexp(mantissa + (1 << f.mantissa_bits), exponent - bias - f.mantissa_bits);
  }
  return code & sign_bit ? -value : value;
}

inline int encode(const Format& f, double value) {
  if (std::isnan(value)) return f.nan;
  const int bias = (1 << (f.exponent_bits - 1)) - 1;
  const int sign = std::signbit(value) ? 1 << (f.exponent_bits + f.mantissa_bits) : 0;
  const int above = f.saturates ? 0x7e : ((1 << f.exponent_bits) - 1) << f.mantissa_bits;
  if (std::isinf(value)) return sign | above;
  int exponent = value == 0 ? 1 - bias : std::max(std::ilogb(value), 1 - bias);
  // The code is the number of last places, counted from zero: exponents and denormals follow by themselves.
  const double places = std::nearbyint(std::ldexp(std::fabs(value), f.mantissa_bits - exponent));
  const double code = places + std::ldexp(exponent + bias - 1, f.mantissa_bits);
  return sign | static_cast<int>(std::min<double>(code, above));
}

template <class T>
T canonical(T value) {
  return value == value ? value : std::numeric_limits<T>::quiet_NaN();
}

template <class T>
T rounded(T value) {
  volatile T result = value;
  return result;
}

template <class T>
T combine_ordered(ReduceOp op, T a, T b) {
  if (a != a || b != b) return std::numeric_limits<T>::quiet_NaN();
  if constexpr (std::is_floating_point_v<T>) {
    if (a == b) return (op == ReduceOp::min) == std::signbit(a) ? a : b;
  }
  return op == ReduceOp::min ? std::min(a, b) : std::max(a, b);
}

template <class T>
T combine_float(ReduceOp op, T a, T b) {
  if (op == ReduceOp::sum) return rounded<T>(a + b);
  if (op == ReduceOp::product) return rounded<T>(a * b);
  return combine_ordered(op, a, b);
}

template <class T>
T combine_integer(ReduceOp op, T a, T b) {
  const auto x = static_cast<uint64_t>(a), y = static_cast<uint64_t>(b);
  switch (op) {
    case ReduceOp::sum: return static_cast<T>(x + y);
    case ReduceOp::product: return static_cast<T>(x * y);
    case ReduceOp::band: return static_cast<T>(x & y);
    case ReduceOp::bor: return static_cast<T>(x | y);
    case ReduceOp::bxor: return static_cast<T>(x ^ y);
    default: return combine_ordered(op, a, b);
  }
}

template <class T>
std::complex<T> combine_complex(ReduceOp op, std::complex<T> a, std::complex<T> b) {
  if (op == ReduceOp::sum) return {rounded<T>(a.real() + b.real()), rounded<T>(a.imag() + b.imag())};
  const T ac = rounded<T>(a.real() * b.real()), bd = rounded<T>(a.imag() * b.imag());
  const T ad = rounded<T>(a.real() * b.imag()), bc = rounded<T>(a.imag() * b.real());
  return {rounded<T>(ac - bd), rounded<T>(ad + bc)};
}

struct Finish {
  int scaled_source = -1;
  double scale = 1;
  int divisor = 1;
};

template <class T, class Combine>
T reduce_scalars(ReduceOp op, std::vector<T>& values, const Finish& finish, Combine combine) {
  using Real = decltype(std::real(T{}));
  if constexpr (!std::is_integral_v<T>) {
    if (finish.scaled_source >= 0) {
      T& source = values[finish.scaled_source];
      const auto factor = static_cast<Real>(finish.scale);
      if constexpr (std::is_floating_point_v<T>) {
        source = rounded<T>(source * factor);
      } else {
        source = {rounded<Real>(source.real() * factor), rounded<Real>(source.imag() * factor)};
      }
    }
  }
  T result = values[0];
  for (size_t i = 1; i < values.size(); ++i) result = combine(op, result, values[i]);
  if (finish.divisor == 1) return result;
  if constexpr (std::is_integral_v<T>) {
    return static_cast<T>(result / finish.divisor);
  } else {
    return result / static_cast<Real>(finish.divisor);
  }
}

template <class T>
T get(const Bytes& bytes, size_t i) {
  T value;
  std::memcpy(&value, bytes.data() + i * sizeof(T), sizeof(T));
  return value;
}

template <class T>
void put(Bytes& bytes, size_t i, T value) {
  std::memcpy(bytes.data() + i * sizeof(T), &value, sizeof(T));
}

template <class T, class Combine>
void reference_as(ReduceOp op, const std::vector<Bytes>& srcs, const Finish& finish, Bytes& out, Combine combine) {
  std::vector<T> values(srcs.size());
  for (size_t i = 0; i < out.size() / sizeof(T); ++i) {
    for (size_t s = 0; s < srcs.size(); ++s) values[s] = get<T>(srcs[s], i);
    T result = reduce_scalars(op, values, finish, combine);
    if constexpr (std::is_floating_point_v<T>) {
      result = canonical(result);
    } else if constexpr (!std::is_integral_v<T>) {
      result = {canonical(result.real()), canonical(result.imag())};
    }
    put(out, i, result);
  }
}

template <class Code>
void reference_small(const Format& f, ReduceOp op, const std::vector<Bytes>& srcs, const Finish& finish, Bytes& out) {
  std::vector<float> values(srcs.size());
  for (size_t i = 0; i < out.size() / sizeof(Code); ++i) {
    for (size_t s = 0; s < srcs.size(); ++s) values[s] = static_cast<float>(decode(f, get<Code>(srcs[s], i)));
    if (finish.scaled_source >= 0) {  // rounded to its own type
      float& scaled = values[finish.scaled_source];
      scaled = static_cast<float>(decode(f, encode(f, rounded<float>(scaled * static_cast<float>(finish.scale)))));
    }
    const Finish divided{.divisor = finish.divisor};
    put(out, i, static_cast<Code>(encode(f, reduce_scalars(op, values, divided, combine_float<float>))));
  }
}

inline Bytes reference(DType dtype, ReduceOp op, const std::vector<Bytes>& srcs, const Finish& finish) {
  Bytes out(srcs[0].size());
  const bool copies = srcs.size() == 1 && finish.scaled_source < 0 && finish.divisor == 1;
  if (copies) return srcs[0];
  if (op == ReduceOp::avg || op == ReduceOp::premul_sum) op = ReduceOp::sum;
  switch (dtype) {
    case DType::float64: reference_as<double>(op, srcs, finish, out, combine_float<double>); break;
    case DType::float32: reference_as<float>(op, srcs, finish, out, combine_float<float>); break;
    case DType::float16: reference_small<uint16_t>(kFloat16, op, srcs, finish, out); break;
    case DType::bfloat16: reference_small<uint16_t>(kBFloat16, op, srcs, finish, out); break;
    case DType::float8_e4m3fn: reference_small<uint8_t>(kE4m3fn, op, srcs, finish, out); break;
    case DType::float8_e5m2: reference_small<uint8_t>(kE5m2, op, srcs, finish, out); break;
    case DType::int64: reference_as<int64_t>(op, srcs, finish, out, combine_integer<int64_t>); break;
    case DType::int32: reference_as<int32_t>(op, srcs, finish, out, combine_integer<int32_t>); break;
    case DType::int16: reference_as<int16_t>(op, srcs, finish, out, combine_integer<int16_t>); break;
    case DType::int8: reference_as<int8_t>(op, srcs, finish, out, combine_integer<int8_t>); break;
    case DType::uint8: reference_as<uint8_t>(op, srcs, finish, out, combine_integer<uint8_t>); break;
    case DType::boolean: {
      const auto logic = [](ReduceOp o, uint8_t a, uint8_t b) -> uint8_t {
        if (o == ReduceOp::bxor) return a != b;
        return o == ReduceOp::sum || o == ReduceOp::max || o == ReduceOp::bor ? (a || b) : (a && b);
      };
      reference_as<uint8_t>(op, srcs, finish, out, logic);
      break;
    }
    case DType::complex64: reference_as<std::complex<float>>(op, srcs, finish, out, combine_complex<float>); break;
    case DType::complex128: reference_as<std::complex<double>>(op, srcs, finish, out, combine_complex<double>); break;
    case DType::uint16:
    case DType::uint32:
    case DType::uint64: break;  // nothing reduces them
  }
  return out;
}

}  // namespace reduce_reference
