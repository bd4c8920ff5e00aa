// Which instance of the GPU's reduction serves a dtype and an operation.
//
// `Run::get<E, Ops>()` gives an instance as a Run::Function that takes ReduceArgs first: a launch on the device, a loop
// over threads in a test. Three tables, so that three files compile at once. Null where another table, or none, serves.
// Only the sums of floats have instances of their own: one for each operation would take far longer to compile.
#pragma once

#include "cuda/reduce.h"

namespace ringlet::cuda {

constexpr bool is_sum(ReduceOp op) noexcept {
  return op == ReduceOp::sum || op == ReduceOp::avg || op == ReduceOp::premul_sum;
}

template <class Run, class E>
typename Run::Function float_function(ReduceOp op) {
  return is_sum(op) ? Run::template get<E, Sums>() : Run::template get<E, Arithmetic>();
}

template <class Run>
typename Run::Function find_float(DType dtype, ReduceOp op) {
  switch (dtype) {
    case DType::float64: return float_function<Run, Float64>(op);
    case DType::float32: return float_function<Run, Float32>(op);
    case DType::float16: return float_function<Run, Float16>(op);
    case DType::bfloat16: return float_function<Run, BFloat16>(op);
    // Complex sums, scales and quotients are those of twice as many reals: see in_counted().
    case DType::complex64: return is_sum(op) ? Run::template get<Float32, Sums>() : nullptr;
    case DType::complex128: return is_sum(op) ? Run::template get<Float64, Sums>() : nullptr;
    default: return nullptr;
  }
}

template <class Run>
typename Run::Function find_float8(DType dtype, ReduceOp) {
  if (dtype == DType::float8_e4m3fn) return Run::template get<Float8<E4m3fnFormat>, Arithmetic>();
  if (dtype == DType::float8_e5m2) return Run::template get<Float8<E5m2Format>, Arithmetic>();
  return nullptr;
}

inline bool is_bitwise(DType dtype, ReduceOp op) noexcept {
  return op == ReduceOp::band || op == ReduceOp::bor || op == ReduceOp::bxor || dtype == DType::boolean;
}

template <class Run>
typename Run::Function find_other(DType dtype, ReduceOp op) {
  if (is_bitwise(dtype, op)) return Run::template get<Integer<uint8_t>, Bitwise>();
  switch (dtype) {
    case DType::int64: return Run::template get<Integer<int64_t>, Arithmetic>();
    case DType::int32: return Run::template get<Integer<int32_t>, Arithmetic>();
    case DType::int16: return Run::template get<Integer<int16_t>, Arithmetic>();
    case DType::int8: return Run::template get<Integer<int8_t>, Arithmetic>();
    case DType::uint8: return Run::template get<Integer<uint8_t>, Arithmetic>();
    case DType::complex64: return is_sum(op) ? nullptr : Run::template get<Complex<Float32>, Products>();
    case DType::complex128: return is_sum(op) ? nullptr : Run::template get<Complex<Float64>, Products>();
    default: return nullptr;
  }
}

/// The same reduction in the elements that the chosen instance counts: bytes where it is bitwise, reals where it adds
/// complex numbers. One source and nothing to compute is a copy, of bytes: `copies` says so.
struct Counted {
  ReduceArgs args;
  bool copies;
};
inline Counted in_counted(ReduceArgs args, DType dtype, ReduceOp op) noexcept {
  const bool copies = args.n == 1 && !(is_sum(op) && (args.scaled_source >= 0 || args.divisor != 1));
  if (copies || is_bitwise(dtype, op)) {
    args.count *= element_size(dtype);
  } else if (is_complex(dtype) && op != ReduceOp::product) {
    args.count *= 2;
  }
  return {args, copies};
}

}  // namespace ringlet::cuda
