// Which instance of the GPU's reduction serves a dtype and an operation.
//
// `Run::get<E, Op>()` gives an instance as a Run::Function that takes ReduceArgs first: a launch on the device, a loop
// over threads in a test. Three tables, so that three files compile at once. Null where another table, or none, serves.
// Integers share instances where only the width matters, bitwise operations where not even that does.
#pragma once

#include "cuda/reduce.h"

namespace ringlet::cuda {

template <class Run, class E>
typename Run::Function sum_or_order(ReduceOp op) {
  switch (op) {
    case ReduceOp::sum:
    case ReduceOp::avg:
    case ReduceOp::premul_sum: return Run::template get<E, Sum>();
    case ReduceOp::min: return Run::template get<E, Min>();
    case ReduceOp::max: return Run::template get<E, Max>();
    default: return nullptr;
  }
}

template <class Run, class E>
typename Run::Function arithmetic(ReduceOp op) {
  return op == ReduceOp::product ? Run::template get<E, Product>() : sum_or_order<Run, E>(op);
}

template <class Run>
typename Run::Function find_float(DType dtype, ReduceOp op) {
  switch (dtype) {
    case DType::float64: return arithmetic<Run, Float64>(op);
    case DType::float32: return arithmetic<Run, Float32>(op);
    case DType::float16: return arithmetic<Run, Float16>(op);
    case DType::bfloat16: return arithmetic<Run, BFloat16>(op);
    // Complex sums, scales and quotients are those of twice as many reals: see in_counted().
    case DType::complex64: return op == ReduceOp::product ? nullptr : Run::template get<Float32, Sum>();
    case DType::complex128: return op == ReduceOp::product ? nullptr : Run::template get<Float64, Sum>();
    default: return nullptr;
  }
}

template <class Run>
typename Run::Function find_float8(DType dtype, ReduceOp op) {
  if (dtype == DType::float8_e4m3fn) return arithmetic<Run, Float8<E4m3fnFormat>>(op);
  if (dtype == DType::float8_e5m2) return arithmetic<Run, Float8<E5m2Format>>(op);
  return nullptr;
}

template <class Run, class T>
typename Run::Function integer(ReduceOp op) {
  switch (op) {
    case ReduceOp::band: return Run::template get<Integer<uint8_t>, And>();
    case ReduceOp::bor: return Run::template get<Integer<uint8_t>, Or>();
    case ReduceOp::bxor: return Run::template get<Integer<uint8_t>, Xor>();
    case ReduceOp::product: return Run::template get<Integer<std::make_unsigned_t<T>>, Product>();
    default: return sum_or_order<Run, Integer<T>>(op);
  }
}

/// On bytes that are 0 or 1.
template <class Run>
typename Run::Function boolean(ReduceOp op) {
  if (op == ReduceOp::bxor) return Run::template get<Integer<uint8_t>, Xor>();
  const bool any = op == ReduceOp::sum || op == ReduceOp::max || op == ReduceOp::bor;
  return any ? Run::template get<Integer<uint8_t>, Or>() : Run::template get<Integer<uint8_t>, And>();
}

template <class Run>
typename Run::Function find_other(DType dtype, ReduceOp op) {
  switch (dtype) {
    case DType::int64: return integer<Run, int64_t>(op);
    case DType::int32: return integer<Run, int32_t>(op);
    case DType::int16: return integer<Run, int16_t>(op);
    case DType::int8: return integer<Run, int8_t>(op);
    case DType::uint8: return integer<Run, uint8_t>(op);
    case DType::boolean: return boolean<Run>(op);
    case DType::complex64: return op == ReduceOp::product ? Run::template get<Complex<Float32>, Product>() : nullptr;
    case DType::complex128: return op == ReduceOp::product ? Run::template get<Complex<Float64>, Product>() : nullptr;
    default: return nullptr;
  }
}

inline bool is_bitwise(DType dtype, ReduceOp op) noexcept {
  return op == ReduceOp::band || op == ReduceOp::bor || op == ReduceOp::bxor || dtype == DType::boolean;
}

/// The same reduction in the elements that the chosen instance counts: bytes where it is bitwise, reals where it adds
/// complex numbers. One source and nothing to compute is a copy, of bytes: `copies` says so.
struct Counted {
  ReduceArgs args;
  bool copies;
};
inline Counted in_counted(ReduceArgs args, DType dtype, ReduceOp op) noexcept {
  const bool sums = op == ReduceOp::sum || op == ReduceOp::avg || op == ReduceOp::premul_sum;
  const bool copies = args.n == 1 && !(sums && (args.scaled_source >= 0 || args.divisor != 1));
  if (copies || is_bitwise(dtype, op)) {
    args.count *= element_size(dtype);
  } else if (is_complex(dtype) && op != ReduceOp::product) {
    args.count *= 2;
  }
  return {args, copies};
}

}  // namespace ringlet::cuda
