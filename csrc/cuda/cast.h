// A cast between float32 and a smaller float, as one of many GPU threads does it: widened exactly, or rounded once.
//
// A unit is as many elements as make 16 bytes of the smaller type, so both sides move in packs of 16 bytes where their
// addresses allow it, with single elements before and after. dst and src do not overlap.
// Ownership: none. Thread safety: threads share no output. The host compiles it too, for tests/cpp/gpu_reduce_test.cc.
#pragma once

#include "cuda/reduce.h"

namespace ringlet::cuda {

struct CastArgs {
  std::byte* dst;
  const std::byte* src;
  size_t count;
  DType to;
  DType from;  ///< one of the two is float32, the other float16, bfloat16 or float8
};

struct CastWork {
  std::byte* dst;
  const std::byte* src;
  size_t count;
  size_t head;  // elements before the first unit; all where there are no units
  size_t units;
};

template <class From, class To>
inline constexpr size_t kUnit =
    kPackBytes /
    (sizeof(typename From::Bits) < sizeof(typename To::Bits) ? sizeof(typename From::Bits) : sizeof(typename To::Bits));

template <class From, class To>
CastWork make_cast_work(const CastArgs& args) {
  CastWork work{args.dst, args.src, args.count, args.count, 0};
  const auto remainder = [](const void* p) { return reinterpret_cast<uintptr_t>(p) % kPackBytes; };
  for (size_t head = 0; head < kUnit<From, To> && head < args.count; ++head) {
    if (remainder(args.src + head * sizeof(typename From::Bits)) != 0) continue;
    if (remainder(args.dst + head * sizeof(typename To::Bits)) != 0) continue;
    work.head = head;
    work.units = (args.count - head) / kUnit<From, To>;
    break;
  }
  return work;
}

template <class From, class To>
RINGLET_BOTH void cast_as_thread(const CastWork& work, size_t thread, size_t threads) {
  using FromBits = typename From::Bits;
  using ToBits = typename To::Bits;
  constexpr size_t kCount = kUnit<From, To>;
  constexpr size_t kIn = kCount * sizeof(FromBits) / kPackBytes, kOut = kCount * sizeof(ToBits) / kPackBytes;
  const auto cast = [](FromBits bits) { return To::narrow(From::widen(bits)); };
  const Pack* from = reinterpret_cast<const Pack*>(work.src + work.head * sizeof(FromBits));
  Pack* to = reinterpret_cast<Pack*>(work.dst + work.head * sizeof(ToBits));
  for (size_t unit = thread; unit < work.units; unit += threads) {
    Pack in[kIn], out[kOut];
    RINGLET_UNROLL
    for (size_t i = 0; i < kIn; ++i) in[i] = from[unit * kIn + i];
    FromBits before[kCount];
    ToBits after[kCount];
    memcpy(before, in, sizeof in);
    RINGLET_UNROLL
    for (size_t i = 0; i < kCount; ++i) after[i] = cast(before[i]);
    memcpy(out, after, sizeof out);
    RINGLET_UNROLL
    for (size_t i = 0; i < kOut; ++i) to[unit * kOut + i] = out[i];
  }
  const size_t whole = work.units * kCount;
  for (size_t i = thread; i < work.count - whole; i += threads) {
    const size_t element = i < work.head ? i : i + whole;
    reinterpret_cast<ToBits*>(work.dst)[element] = cast(reinterpret_cast<const FromBits*>(work.src)[element]);
  }
}

/// `Run::get<From, To>()` as in table.h; null where this is no such pair.
template <class Run>
typename Run::Function find_cast(DType from, DType to) {
  const bool widens = to == DType::float32;
  if (!widens && from != DType::float32) return nullptr;
  switch (widens ? from : to) {
    case DType::float16: return widens ? Run::template get<Float16, Float32>() : Run::template get<Float32, Float16>();
    case DType::bfloat16:
      return widens ? Run::template get<BFloat16, Float32>() : Run::template get<Float32, BFloat16>();
    case DType::float8_e4m3fn:
      return widens ? Run::template get<Float8<E4m3fnFormat>, Float32>()
                    : Run::template get<Float32, Float8<E4m3fnFormat>>();
    case DType::float8_e5m2:
      return widens ? Run::template get<Float8<E5m2Format>, Float32>()
                    : Run::template get<Float32, Float8<E5m2Format>>();
    default: return nullptr;
  }
}

}  // namespace ringlet::cuda
