// The reduction loop and the table of kernels, for one Machine (see vector.h). Each level's file includes this once.
//
// One pass: it combines a block of vectors over all sources in registers, finishes it, and stores it to dst and dst2;
// then single vectors; then one part vector. A long output starts with a part vector that aligns dst. In a still longer
// one, the vectors of a block come from parts far apart (kSideBySideBytes). NextReader says in which cache the results
// should be. Only sum uses scaled_source and divisor.
#pragma once

#include <type_traits>

#include "reduce/elements.h"
#include "reduce/level.h"

namespace ringlet {
namespace {

#define RINGLET_INLINE inline __attribute__((always_inline))

// Below this size an unaligned vector store costs less than the part vector that would align it.
inline constexpr size_t kLongBytes = 1024;
// The processor's prefetcher stops at the end of a page. Small floats compute too long for reads to overlap without
// prefetching: 2 KiB ahead was best on a Xeon with AMX (bfloat16 beyond the cache on AVX2: two times faster), and costs
// nothing if the data are in the cache.
inline constexpr size_t kPrefetchBytes = 2048;
inline constexpr int kLineBytes = 64;
// Up to this size, results that another core reads next are demoted to the shared cache, from where that core gets them
// sooner. For more, demoting takes longer than that gains.
inline constexpr size_t kDemoteBytes = 8 << 10;  ///< up to this size, what a peer reads next is pushed to the cache
                                                 ///< that cores share
// From that size on, a core requests a line from the core that read it last, so many bytes before it writes the line.
inline constexpr size_t kOwnAheadBytes = 1024;
// Passes side by side begin at different places of their pages: otherwise they would compete for the same sets of the
// cache.
inline constexpr size_t kPageBytes = 4096;
inline constexpr size_t kSkewBytes = 17 * kLineBytes;
static_assert(kSideBySideBytes >= 8 * kPageBytes && kDemoteBytes >= kOwnAheadBytes);

inline bool starts_line(const std::byte* p) { return reinterpret_cast<uintptr_t>(p) % kLineBytes == 0; }

template <class E>
using ScalarOf = std::remove_reference_t<decltype(typename E::Value{}[0])>;

/// The product is rounded to the element type, as peers read it where it is staged.
template <class E>
RINGLET_INLINE void scale(const ReduceArgs& args, typename E::Value* values) {
  if constexpr (!kIsInteger<E>) {
    for (int i = 0; i < E::kParts; ++i) values[i] = values[i] * static_cast<ScalarOf<E>>(args.scale);
    if constexpr (E::kSize < sizeof(ScalarOf<E>)) E::unpack(E::pack(values), values);
  }
}

template <class E>
RINGLET_INLINE void divide(int divisor, typename E::Value* values) {
  if constexpr (kIsInteger<E>) {
    const auto ordered = (typename E::Ordered)values[0];
    std::remove_cv_t<std::remove_reference_t<decltype(ordered[0])>> lanes[sizeof ordered / E::kSize];
    __builtin_memcpy(lanes, &ordered, sizeof lanes);
    for (auto& lane : lanes) lane = lane / divisor;
    __builtin_memcpy(values, lanes, sizeof lanes);
  } else if ((divisor & (divisor - 1)) == 0) {
    for (int i = 0; i < E::kParts; ++i) values[i] = values[i] * (1 / static_cast<ScalarOf<E>>(divisor));
  } else {
    for (int i = 0; i < E::kParts; ++i) values[i] = values[i] / static_cast<ScalarOf<E>>(divisor);
  }
}

/// kVectors results at byte `at`; load(p, at, v) is the v-th vector of p's. kSources 0 is the general case; otherwise
/// n == kSources, no scale, no divisor.
template <class Machine, class E, class Op, int kSources, int kVectors, class Load>
RINGLET_INLINE void combine(const ReduceArgs& args, const std::byte* const* srcs, size_t at, Load load,
                            Words<Machine>* results) {
  constexpr bool kLinear = kSources == 0 && std::is_same_v<Op, Sum>;
  typename E::Value values[kVectors][E::kParts];
  for (int v = 0; v < kVectors; ++v) {
    E::unpack(load(srcs[0], at, v), values[v]);
    if (kLinear && args.scaled_source == 0) scale<E>(args, values[v]);
  }
  const int n = kSources != 0 ? kSources : args.n;
  for (int source = 1; source < n; ++source) {
    for (int v = 0; v < kVectors; ++v) {
      typename E::Value next[E::kParts];
      E::unpack(load(srcs[source], at, v), next);
      if (kLinear && args.scaled_source == source) scale<E>(args, next);
      for (int i = 0; i < E::kParts; ++i) values[v][i] = Op::template apply<E>(values[v][i], next[i]);
    }
  }
  for (int v = 0; v < kVectors; ++v) {
    if (kLinear && args.divisor != 1) divide<E>(args.divisor, values[v]);
    results[v] = E::pack(values[v]);
  }
}

/// Where results go. A destination uses non-temporal stores only if they will be aligned and no cache holds its lines:
/// a line that was just read as a source is in the cache. At most one of demote, ahead and stream is in use.
template <class Machine>
struct Output {
  std::byte* dst;
  std::byte* dst2;
  bool stream = false;
  bool stream2 = false;
  bool demote = false;
  size_t ahead = 0;  // bytes of dst to request ahead

  void store(size_t at, Words<Machine> words) const {
    if (at < ahead && starts_line(dst + at)) Machine::own(dst + at + kOwnAheadBytes);
    stream ? Machine::stream(dst + at, words) : write(dst + at, words);
    if (demote && starts_line(dst + at + Machine::kBytes)) Machine::demote(dst + at);
    if (dst2 != nullptr) stream2 ? Machine::stream(dst2 + at, words) : write(dst2 + at, words);
  }
  void store_part(size_t at, Words<Machine> words, size_t bytes) const {
    Machine::store_part(dst + at, words, bytes);
    if (demote) Machine::demote(dst + at);
    if (dst2 != nullptr) Machine::store_part(dst2 + at, words, bytes);
  }
  void choose_hints(const ReduceArgs& args, size_t bytes) {
    if (args.next != NextReader::peer) return;
    demote = bytes <= kDemoteBytes;
    if (!demote) ahead = bytes - kOwnAheadBytes;
  }
  void choose_streams(const ReduceArgs& args, size_t at) {
    const auto aligned = [at](std::byte* p) { return (reinterpret_cast<uintptr_t>(p) + at) % Machine::kBytes == 0; };
    stream = args.next == NextReader::nobody && aligned(dst);
    stream2 = args.next == NextReader::nobody && dst2 != nullptr && aligned(dst2);
    for (int i = 0; i < args.n; ++i) stream = stream && args.srcs[i] != dst;
  }
};

template <class Machine>
RINGLET_INLINE Words<Machine> read_one(const std::byte* p, size_t at, int) {
  return read<Words<Machine>>(p + at);
}

/// The vector at `at`; also prefetches the line that the loop will need soon.
template <class Machine>
RINGLET_INLINE Words<Machine> read_ahead(const std::byte* p, size_t at, size_t end) {
  if (at % kLineBytes < Machine::kBytes && at + kPrefetchBytes < end) __builtin_prefetch(p + at + kPrefetchBytes);
  return read<Words<Machine>>(p + at);
}

template <class Machine, class E, class Op, int kSources>
void reduce(const ReduceArgs& args) {
  constexpr size_t kBytes = Machine::kBytes;
  constexpr int kVectors = 4 / E::kParts;
  const size_t bytes = args.count * E::kSize;
  const std::byte* fixed[kSources + 1];  // known not to alias what is stored, so kept in registers
  for (int i = 0; i < kSources; ++i) fixed[i] = args.srcs[i];
  const std::byte* const* srcs = kSources != 0 ? fixed : args.srcs;
  Output<Machine> output = {args.dst, args.dst2};
  output.choose_hints(args, bytes);
  const auto do_part = [&](size_t at, size_t size) __attribute__((always_inline)) {
    Words<Machine> result[1];
    const auto load_part = [size](const std::byte* p, size_t at, int) { return Machine::load_part(p + at, size); };
    combine<Machine, E, Op, kSources, 1>(args, srcs, at, load_part, result);
    output.store_part(at, result[0], size);
  };

  size_t at = 0;
  if (bytes >= kLongBytes) {
    const size_t head = -reinterpret_cast<uintptr_t>(args.dst) % kBytes;
    if (head != 0 && head % E::kSize == 0) do_part(0, at = head);
    output.choose_streams(args, at);
  }
  const auto do_blocks = [&](size_t end, size_t step, auto apart) __attribute__((always_inline)) {
    const auto load_ahead = [=](const std::byte* p, size_t at, int v) __attribute__((always_inline)) {
      return read_ahead<Machine>(p, at + v * apart, bytes);
    };
    for (; at + step <= end; at += step) {
      Words<Machine> results[kVectors];
      combine<Machine, E, Op, kSources, kVectors>(args, srcs, at, load_ahead, results);
      for (int v = 0; v < kVectors; ++v) output.store(at + v * apart, results[v]);
    }
  };
  const bool streams = output.stream || output.stream2;
  if (kVectors > 1 && !streams && bytes >= kSideBySideBytes) {
    const size_t part = (bytes - at) / kVectors / kPageBytes * kPageBytes - kSkewBytes;
    do_blocks(at + part, kBytes, part);
    at += (kVectors - 1) * part;
  }
  do_blocks(bytes, kVectors * kBytes, std::integral_constant<size_t, kBytes>());
  for (; at + kBytes <= bytes; at += kBytes) {
    Words<Machine> result[1];
    combine<Machine, E, Op, kSources, 1>(args, srcs, at, read_one<Machine>, result);
    output.store(at, result[0]);
  }
  if (at < bytes) do_part(at, bytes - at);
  if (streams) Machine::fence();
}

/// n == 1, count in bytes; every bit is kept.
template <class Machine>
void copy(const ReduceArgs& args) {
  ReduceArgs rest = args;
  if (args.dst == args.srcs[0]) {
    if (args.dst2 == nullptr) return;
    rest.dst = args.dst2;
    rest.dst2 = nullptr;
  }
  reduce<Machine, Integer<Machine, uint8_t>, Or, 1>(rest);
}

/// Only a sum has code of its own for two sources: it is what calls spend their time in.
template <class Machine, class E, class Op>
void kernel(const ReduceArgs& args) {
  const bool plain = !std::is_same_v<Op, Sum> || (args.scaled_source < 0 && args.divisor == 1);
  if (args.n == 1 && plain) {
    ReduceArgs bytes = args;
    bytes.count *= E::kSize;
    return copy<Machine>(bytes);
  }
  if constexpr (std::is_same_v<Op, Sum>) {
    if (args.n == 2 && plain) return reduce<Machine, E, Op, 2>(args);
  }
  reduce<Machine, E, Op, 0>(args);
}

/// A sum, scale or quotient of complex numbers is one of twice as many real numbers.
template <ReduceKernel kReal>
void as_pairs(const ReduceArgs& args) {
  ReduceArgs pairs = args;
  pairs.count *= 2;
  kReal(pairs);
}

template <class Machine, class E>
ReduceKernel arithmetic(ReduceOp op) {
  switch (op) {
    case ReduceOp::sum:
    case ReduceOp::avg:
    case ReduceOp::premul_sum: return kernel<Machine, E, Sum>;
    case ReduceOp::product: return kernel<Machine, E, Product>;
    case ReduceOp::min: return kernel<Machine, E, Min>;
    case ReduceOp::max: return kernel<Machine, E, Max>;
    default: return nullptr;
  }
}

template <class Machine, class T>
ReduceKernel integer(ReduceOp op) {
  using Bits = Integer<Machine, std::make_unsigned_t<T>>;
  switch (op) {
    case ReduceOp::band: return kernel<Machine, Bits, And>;
    case ReduceOp::bor: return kernel<Machine, Bits, Or>;
    case ReduceOp::bxor: return kernel<Machine, Bits, Xor>;
    case ReduceOp::product: return kernel<Machine, Bits, Product>;
    default: return arithmetic<Machine, Integer<Machine, T>>(op);
  }
}

template <class Machine, class T>
ReduceKernel complex(ReduceOp op) {
  using Numbers = Complex<Machine, T>;
  if (op == ReduceOp::product) return kernel<Machine, Numbers, Product>;
  return as_pairs<kernel<Machine, typename Numbers::Reals, Sum>>;
}

/// On bytes that are 0 or 1.
template <class Machine>
ReduceKernel boolean(ReduceOp op) {
  using Bytes = Integer<Machine, uint8_t>;
  if (op == ReduceOp::bxor) return kernel<Machine, Bytes, Xor>;
  const bool any = op == ReduceOp::sum || op == ReduceOp::max || op == ReduceOp::bor;
  return any ? kernel<Machine, Bytes, Or> : kernel<Machine, Bytes, And>;
}

template <class Machine>
ReduceKernel find_kernel(DType dtype, ReduceOp op) {
  if (!supports(dtype, op)) return nullptr;
  switch (dtype) {
    case DType::float64: return arithmetic<Machine, Float64<Machine>>(op);
    case DType::float32: return arithmetic<Machine, Float32<Machine>>(op);
    case DType::float16: return arithmetic<Machine, Float16<Machine>>(op);
    case DType::bfloat16: return arithmetic<Machine, BFloat16<Machine>>(op);
    case DType::float8_e4m3fn: return arithmetic<Machine, Float8<Machine, kE4m3fn>>(op);
    case DType::float8_e5m2: return arithmetic<Machine, Float8<Machine, kE5m2>>(op);
    case DType::int64: return integer<Machine, int64_t>(op);
    case DType::int32: return integer<Machine, int32_t>(op);
    case DType::int16: return integer<Machine, int16_t>(op);
    case DType::int8: return integer<Machine, int8_t>(op);
    case DType::uint8: return integer<Machine, uint8_t>(op);
    case DType::boolean: return boolean<Machine>(op);
    case DType::complex64: return complex<Machine, float>(op);
    case DType::complex128: return complex<Machine, double>(op);
    case DType::uint16:
    case DType::uint32:
    case DType::uint64: break;
  }
  return nullptr;
}

}  // namespace
}  // namespace ringlet
