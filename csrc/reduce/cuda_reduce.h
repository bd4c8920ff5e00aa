// The reduction as one of many GPU threads does it: reduce.h's contract, on memory that the device can address.
//
// Where all addresses have the same remainder by 16, packs of 16 bytes are loaded and stored whole, and the elements
// before the first and after the last pack one by one; otherwise all elements one by one. A thread takes packs
// `threads` apart, so neighbours touch neighbouring packs. In place is safe: who writes an element read it before.
// Alignment: that of the element's scalar type. Ownership: none. Thread safety: threads share no output.
// Host code, too: tests/cpp/gpu_reduce_test.cc runs all threads of a grid one after another.
#pragma once

#include "base/dtype.h"
#include "reduce/cuda_elements.h"
#include "reduce/reduce.h"

namespace ringlet::cuda {

inline constexpr size_t kPackBytes = 16;
/// Sources of one pass: all that a reduction combines, or it would be rounded more than once.
inline constexpr int kMostSources = 128;

struct alignas(16) Pack {
  uint32_t words[4];
};

/// A kernel's parameters; two sources take a tenth of the room, which every launch copies.
template <int kMost>
struct Work {
  std::byte* dst;
  std::byte* dst2;
  size_t count;
  size_t head;   // elements before the first pack; all where there are no packs
  size_t packs;  // of dst
  double scale;
  int n;
  int scaled_source;
  int divisor;
  const std::byte* srcs[kMost];
};

/// Finds the packs of a work of which all else is given; `size`: of an element.
template <int kMost>
RINGLET_BOTH void find_packs(Work<kMost>& work, size_t size) {
  const auto remainder = [](const std::byte* p) { return reinterpret_cast<uintptr_t>(p) % kPackBytes; };
  const size_t start = remainder(work.dst);
  bool alike = work.dst2 == nullptr || remainder(work.dst2) == start;
  for (int i = 0; i < work.n; ++i) alike = alike && remainder(work.srcs[i]) == start;
  const size_t before = (kPackBytes - start) % kPackBytes;
  const bool fits = alike && before % size == 0 && before / size < work.count;
  work.head = fits ? before / size : work.count;
  work.packs = (work.count - work.head) * size / kPackBytes;
}

template <int kMost>
Work<kMost> make_work(const ReduceArgs& args, size_t size) {
  Work<kMost> work{args.dst, args.dst2, args.count, 0, 0, args.scale, args.n, args.scaled_source, args.divisor, {}};
  for (int i = 0; i < args.n; ++i) work.srcs[i] = args.srcs[i];
  find_packs(work, size);
  return work;
}

template <class E>
inline constexpr size_t kPerPack = kPackBytes / sizeof(typename E::Bits);

/// The memory image of a pack or, with kCount 1, of one element, and what is computed with it.
template <class E, class Op, size_t kCount>
struct Values {
  using Bits = typename E::Bits;
  using Held = std::conditional_t<Op::kBitwise, Bits, typename E::Value>;
  Held held[kCount];

  RINGLET_BOTH void unpack(const Bits* bits) {
    RINGLET_UNROLL
    for (size_t i = 0; i < kCount; ++i) {
      if constexpr (Op::kBitwise) {
        held[i] = bits[i];
      } else {
        held[i] = E::widen(bits[i]);
      }
    }
  }
  RINGLET_BOTH void pack(Bits* bits) const {
    RINGLET_UNROLL
    for (size_t i = 0; i < kCount; ++i) {
      if constexpr (Op::kBitwise) {
        bits[i] = held[i];
      } else {
        bits[i] = E::narrow(held[i]);
      }
    }
  }
  RINGLET_BOTH void unpack(const Pack& pack) {
    Bits bits[kCount];
    memcpy(bits, &pack, sizeof bits);
    unpack(bits);
  }
  RINGLET_BOTH void pack(Pack& pack) const {
    Bits bits[kCount];
    this->pack(bits);
    memcpy(&pack, bits, sizeof bits);
  }
  RINGLET_BOTH void combine(const Values& next) {
    RINGLET_UNROLL
    for (size_t i = 0; i < kCount; ++i) held[i] = Op::template apply<E>(held[i], next.held[i]);
  }
  RINGLET_BOTH void scale(double factor) {
    if constexpr (!kIsInteger<E>) {
      RINGLET_UNROLL
      for (size_t i = 0; i < kCount; ++i) held[i] = held[i] * static_cast<Held>(factor);
    }
  }
  RINGLET_BOTH void divide(int divisor) {
    RINGLET_UNROLL
    for (size_t i = 0; i < kCount; ++i) {
      if constexpr (kIsInteger<E>) {
        held[i] = static_cast<Held>(static_cast<typename E::Ordered>(held[i]) / divisor);
      } else if ((divisor & (divisor - 1)) == 0) {
        held[i] = held[i] * (1 / static_cast<Held>(divisor));
      } else {
        held[i] = held[i] / static_cast<Held>(divisor);
      }
    }
  }
};

/// What a bitwise operation combines is words, whatever they are made of.
template <class E, class Op>
using PackElement = std::conditional_t<Op::kBitwise, Integer<uint32_t>, E>;

/// kPacks packs, `apart` from each other, from pack `at` on. kMost 2: two sources, no scale, no divisor.
template <class E, class Op, int kMost, int kPacks>
RINGLET_BOTH void combine_packs(const Work<kMost>& work, size_t at, size_t apart) {
  using Part = PackElement<E, Op>;
  constexpr size_t kCount = kPerPack<Part>;
  constexpr bool kLinear = kMost != 2 && std::is_same_v<Op, Sum>;
  const size_t start = work.head * sizeof(typename E::Bits) + at * kPackBytes;
  const auto load = [&](const std::byte* src, Pack* packs) {
    RINGLET_UNROLL
    for (int p = 0; p < kPacks; ++p) {
      packs[p] = *global(reinterpret_cast<const Pack*>(src + start + p * apart * kPackBytes));
    }
  };
  Pack packs[kPacks];
  Values<Part, Op, kCount> sums[kPacks];
  load(work.srcs[0], packs);
  RINGLET_UNROLL
  for (int p = 0; p < kPacks; ++p) {
    sums[p].unpack(packs[p]);
    if constexpr (kLinear) {
      if (work.scaled_source == 0) sums[p].scale(work.scale);
    }
  }
  const int n = kMost == 2 ? 2 : work.n;
  for (int source = 1; source < n; ++source) {
    load(work.srcs[source], packs);
    RINGLET_UNROLL
    for (int p = 0; p < kPacks; ++p) {
      Values<Part, Op, kCount> next;
      next.unpack(packs[p]);
      if constexpr (kLinear) {
        if (work.scaled_source == source) next.scale(work.scale);
      }
      sums[p].combine(next);
    }
  }
  RINGLET_UNROLL
  for (int p = 0; p < kPacks; ++p) {
    if constexpr (kLinear) {
      if (work.divisor != 1) sums[p].divide(work.divisor);
    }
    Pack result;
    sums[p].pack(result);
    const size_t place = start + p * apart * kPackBytes;
    *global(reinterpret_cast<Pack*>(work.dst + place)) = result;
    if (work.dst2 != nullptr) *global(reinterpret_cast<Pack*>(work.dst2 + place)) = result;
  }
}

template <class E, class Op, int kMost>
RINGLET_BOTH void combine_one(const Work<kMost>& work, size_t element) {
  using Bits = typename E::Bits;
  constexpr bool kLinear = kMost != 2 && std::is_same_v<Op, Sum>;
  const auto load = [&](int source, Values<E, Op, 1>& values) {
    values.unpack(global(reinterpret_cast<const Bits*>(work.srcs[source]) + element));
    if constexpr (kLinear) {
      if (work.scaled_source == source) values.scale(work.scale);
    }
  };
  Values<E, Op, 1> sum;
  load(0, sum);
  for (int source = 1; source < work.n; ++source) {
    Values<E, Op, 1> next;
    load(source, next);
    sum.combine(next);
  }
  if constexpr (kLinear) {
    if (work.divisor != 1) sum.divide(work.divisor);
  }
  Bits bits[1];
  sum.pack(bits);
  *global(reinterpret_cast<Bits*>(work.dst) + element) = bits[0];
  if (work.dst2 != nullptr) *global(reinterpret_cast<Bits*>(work.dst2) + element) = bits[0];
}

/// Packs that a thread has under way at once, per source: bytes in flight are what memory bandwidth is made of. Fewer
/// where a pack takes more registers: in small floats it is widened, and a complex product keeps both factors.
template <class E, class Op>
inline constexpr int kPacksAtOnce = !Op::kBitwise && (sizeof(typename E::Bits) == 1 || kIsComplex<E>) ? 2 : 4;

template <class E, class Op, int kMost>
RINGLET_BOTH void reduce_as_thread(const Work<kMost>& work, size_t thread, size_t threads) {
  constexpr int kPacks = kPacksAtOnce<E, Op>;
  size_t pack = thread;
  for (; pack + (kPacks - 1) * threads < work.packs; pack += kPacks * threads) {
    combine_packs<E, Op, kMost, kPacks>(work, pack, threads);
  }
  for (; pack < work.packs; pack += threads) combine_packs<E, Op, kMost, 1>(work, pack, threads);
  const size_t packed = work.packs * kPerPack<E>;
  for (size_t i = thread; i < work.count - packed; i += threads) {
    combine_one<E, Op>(work, i < work.head ? i : i + packed);
  }
}

}  // namespace ringlet::cuda
