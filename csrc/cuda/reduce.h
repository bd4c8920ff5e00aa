// The reduction as one of many GPU threads does it: reduce.h's contract, on memory that the device can address.
//
// Where all addresses have the same remainder by 16, packs of 16 bytes are loaded and stored whole, and the elements
// before the first and after the last pack one by one; otherwise all elements are, several under way at once. A thread takes packs
// `threads` apart, so neighbours touch neighbouring packs. In place is safe: who writes an element read it before.
// Alignment: that of the element's scalar type. Ownership: none. Thread safety: threads share no output.
// Host code, too: tests/cpp/reduce_test.cc runs all threads of a grid one after another.
#pragma once

#include "base/dtype.h"
#include "cuda/elements.h"
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
struct ReduceWork {
  std::byte* dst;
  std::byte* dst2;
  size_t count;
  size_t head;   // elements before the first pack; all where there are no packs
  size_t packs;  // of dst
  double scale;
  int n;
  int scaled_source;
  int divisor;
  ReduceOp op;
  const std::byte* srcs[kMost];
};

/// A size that is known when the kernel is compiled. (std::integral_constant's is the host's to ask.)
template <size_t kSize>
struct Bytes {
  RINGLET_BOTH constexpr operator size_t() const { return kSize; }
};

/// How far an address is from a pack's start.
RINGLET_BOTH size_t past_pack(const void* address) { return reinterpret_cast<uintptr_t>(address) % kPackBytes; }

/// Finds the packs of a work of which all else is given. `alike`: the sources are as far from a pack's start as dst.
/// `size`, of an element: a number, or Bytes<>, by which a device need not divide.
template <int kMost, class Size>
RINGLET_BOTH void find_packs(ReduceWork<kMost>& work, Size size, bool alike) {
  const size_t start = past_pack(work.dst);
  const size_t before = (kPackBytes - start) % kPackBytes;
  const bool fits = alike && (work.dst2 == nullptr || past_pack(work.dst2) == start) && before % size == 0 &&
                    before / size < work.count;
  work.head = fits ? before / size : work.count;
  work.packs = (work.count - work.head) * size / kPackBytes;
}

template <int kMost>
ReduceWork<kMost> make_work(const ReduceArgs& args, ReduceOp op, size_t size) {
  ReduceWork<kMost> work{args.dst, args.dst2,          args.count,   0,  0, args.scale,
                         args.n,   args.scaled_source, args.divisor, op, {}};
  for (int i = 0; i < args.n; ++i) work.srcs[i] = args.srcs[i];
  bool alike = true;
  for (int i = 0; i < args.n; ++i) alike = alike && past_pack(args.srcs[i]) == past_pack(args.dst);
  find_packs(work, size, alike);
  return work;
}

template <class E>
inline constexpr size_t kPerPack = kPackBytes / sizeof(typename E::Bits);

/// The memory image of a pack or, with kCount 1, of one element, and what is computed with it.
template <class E, class Ops, size_t kCount>
struct Values {
  using Bits = typename E::Bits;
  using Held = std::conditional_t<Ops::kBitwise, Bits, typename E::Value>;
  Held held[kCount];

  RINGLET_BOTH void unpack(const Bits* bits) {
    RINGLET_UNROLL
    for (size_t i = 0; i < kCount; ++i) {
      if constexpr (Ops::kBitwise) {
        held[i] = bits[i];
      } else {
        held[i] = E::widen(bits[i]);
      }
    }
  }
  RINGLET_BOTH void pack(Bits* bits) const {
    RINGLET_UNROLL
    for (size_t i = 0; i < kCount; ++i) {
      if constexpr (Ops::kBitwise) {
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
  RINGLET_BOTH void combine(ReduceOp op, const Values& next) {
    Ops::which(op, [&](auto one) {
      RINGLET_UNROLL
      for (size_t i = 0; i < kCount; ++i) held[i] = decltype(one)::template apply<E>(held[i], next.held[i]);
    });
  }
  /// The product is rounded to the element type, as peers read it where it is staged.
  RINGLET_BOTH void scale(double factor) {
    if constexpr (!kIsInteger<E>) {
      RINGLET_UNROLL
      for (size_t i = 0; i < kCount; ++i) {
        held[i] = held[i] * static_cast<Held>(factor);
        if constexpr (sizeof(Bits) < sizeof(Held)) held[i] = E::widen(E::narrow(held[i]));
      }
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
template <class E, class Ops>
using PackElement = std::conditional_t<Ops::kBitwise, Integer<uint32_t>, E>;

template <class E, class Ops>
inline constexpr bool kIsSmall = std::is_same_v<Ops, Arithmetic> && sizeof(typename E::Bits) < 4;

/// How many sources are loaded before the first is combined: each is a way to memory and back, perhaps another GPU's.
/// Small numbers are widened, and have no registers for more beside code for each operation.
template <class E, class Ops>
inline constexpr int kSourcesAtOnce = kIsSmall<E, Ops> ? 2 : 4;

/// kPacks packs, `apart` from each other, from pack `at` on. `kPair`: two sources, no scale, no divisor.
template <class E, class Ops, int kMost, bool kPair, int kPacks>
class CombinePacks {
 public:
  RINGLET_BOTH CombinePacks(const ReduceWork<kMost>& work, size_t at, size_t apart)
      : work_(work), start_(work.head * sizeof(typename E::Bits) + at * kPackBytes), apart_(apart * kPackBytes) {}

  RINGLET_BOTH void run() {
    if constexpr (kPair) {
      take<2>(0);
    } else {
      int source = 0;
      for (; source + kMany <= work_.n; source += kMany) take<kMany>(source);
      if (kMany > 2 && source + 2 <= work_.n) {
        take<2>(source);
        source += 2;
      }
      if (source < work_.n) take<1>(source);
    }
    store();
  }

 private:
  using Part = PackElement<E, Ops>;
  using Parts = Values<Part, Ops, kPerPack<Part>>;
  static constexpr bool kLinear = !kPair && Ops::kLinear;
  static constexpr int kMany = kSourcesAtOnce<E, Ops>;
  static_assert(kMany == 4 || kMany == 2);  // so what is left is less than 4

  /// From `first` on, in their order.
  template <int kSources>
  RINGLET_BOTH void take(int first) {
    Pack packs[kSources][kPacks];
    RINGLET_UNROLL
    for (int s = 0; s < kSources; ++s) {
      RINGLET_UNROLL
      for (int p = 0; p < kPacks; ++p) {
        packs[s][p] = *global(reinterpret_cast<const Pack*>(work_.srcs[first + s] + start_ + p * apart_));
      }
    }
    RINGLET_UNROLL
    for (int s = 0; s < kSources; ++s) {
      RINGLET_UNROLL
      for (int p = 0; p < kPacks; ++p) {
        Parts next;
        next.unpack(packs[s][p]);
        if constexpr (kLinear) {
          if (work_.scaled_source == first + s) next.scale(work_.scale);
        }
        if (s == 0 && first == 0) {
          sums_[p] = next;
        } else {
          sums_[p].combine(work_.op, next);
        }
      }
    }
  }

  RINGLET_BOTH void store() {
    RINGLET_UNROLL
    for (int p = 0; p < kPacks; ++p) {
      if constexpr (kLinear) {
        if (work_.divisor != 1) sums_[p].divide(work_.divisor);
      }
      Pack result;
      sums_[p].pack(result);
      const size_t place = start_ + p * apart_;
      *global(reinterpret_cast<Pack*>(work_.dst + place)) = result;
      if (work_.dst2 != nullptr) *global(reinterpret_cast<Pack*>(work_.dst2 + place)) = result;
    }
  }

  const ReduceWork<kMost>& work_;
  const size_t start_, apart_;  // bytes
  Parts sums_[kPacks];
};

/// kCount elements, `apart` from each other, from `element` on. What is not aligned is loaded one element at a time, and
/// several are under way as packs are.
template <class E, class Ops, int kMost, bool kPair, int kCount>
RINGLET_BOTH void combine_elements(const ReduceWork<kMost>& work, size_t element, size_t apart) {
  using Bits = typename E::Bits;
  constexpr bool kLinear = !kPair && Ops::kLinear;
  const auto load = [&](int source, Values<E, Ops, kCount>& values) {
    Bits bits[kCount];
    RINGLET_UNROLL
    for (int i = 0; i < kCount; ++i) {
      bits[i] = *global(reinterpret_cast<const Bits*>(work.srcs[source]) + element + i * apart);
    }
    values.unpack(bits);
    if constexpr (kLinear) {
      if (work.scaled_source == source) values.scale(work.scale);
    }
  };
  Values<E, Ops, kCount> sums;
  load(0, sums);
  const int sources = kPair ? 2 : work.n;
  for (int source = 1; source < sources; ++source) {
    Values<E, Ops, kCount> next;
    load(source, next);
    sums.combine(work.op, next);
  }
  if constexpr (kLinear) {
    if (work.divisor != 1) sums.divide(work.divisor);
  }
  Bits bits[kCount];
  sums.pack(bits);
  RINGLET_UNROLL
  for (int i = 0; i < kCount; ++i) {
    const size_t place = element + i * apart;
    *global(reinterpret_cast<Bits*>(work.dst) + place) = bits[i];
    if (work.dst2 != nullptr) *global(reinterpret_cast<Bits*>(work.dst2) + place) = bits[i];
  }
}

/// Packs that a thread has under way at once, per source: bytes in flight are what memory bandwidth is made of. Fewer
/// where a pack takes more registers: small numbers are widened, and a complex product keeps both factors.
template <class E, class Ops>
inline constexpr int kPacksAtOnce = kIsSmall<E, Ops> || kIsComplex<E> ? 2 : 4;

/// Elements that are not in packs, of which a thread has so many under way at once. More of the float8s would be spilt.
template <class E, class Ops>
inline constexpr int kElementsAtOnce =
    sizeof(typename E::Bits) == 1 && !kIsInteger<E>                                   ? 2
    : sizeof(typename E::Bits) == 1 || sizeof(typename E::Bits) >= 8 || kIsComplex<E> ? 4
                                                                                      : 8;

template <class E, class Ops, int kMost, bool kPair = kMost == 2, int kPacks = kPacksAtOnce<E, Ops>>
RINGLET_BOTH void reduce_as_thread(const ReduceWork<kMost>& work, size_t thread, size_t threads) {
  size_t pack = thread;
  for (; pack + (kPacks - 1) * threads < work.packs; pack += kPacks * threads) {
    CombinePacks<E, Ops, kMost, kPair, kPacks>(work, pack, threads).run();
  }
  for (; pack < work.packs; pack += threads) CombinePacks<E, Ops, kMost, kPair, 1>(work, pack, threads).run();
  const size_t packed = work.packs * kPerPack<E>, rest = work.count - packed;
  size_t i = thread;
  if (packed == 0) {
    constexpr int kCount = kElementsAtOnce<E, Ops>;
    for (; i + (kCount - 1) * threads < rest; i += kCount * threads) {
      combine_elements<E, Ops, kMost, kPair, kCount>(work, i, threads);
    }
  }
  for (; i < rest; i += threads) {
    combine_elements<E, Ops, kMost, kPair, 1>(work, i < work.head ? i : i + packed, threads);
  }
}

/// So many units of a copy at a time, `apart` from each other.
template <int kUnits, class Unit>
RINGLET_BOTH void copy_units(const Unit* src, Unit* dst, Unit* dst2, size_t apart) {
  Unit units[kUnits];
  RINGLET_UNROLL
  for (int u = 0; u < kUnits; ++u) units[u] = *global(src + u * apart);
  RINGLET_UNROLL
  for (int u = 0; u < kUnits; ++u) {
    *global(dst + u * apart) = units[u];
    if (dst2 != nullptr) *global(dst2 + u * apart) = units[u];
  }
}

template <class Unit>
RINGLET_BOTH void copy_range(const std::byte* from, std::byte* to, std::byte* too, size_t count, size_t thread,
                             size_t threads) {
  constexpr size_t kAtOnce = 8;
  const auto* src = reinterpret_cast<const Unit*>(from);
  auto *dst = reinterpret_cast<Unit*>(to), *dst2 = reinterpret_cast<Unit*>(too);
  const auto place = [](Unit* base, size_t i) { return base == nullptr ? nullptr : base + i; };
  size_t i = thread;
  for (; i + (kAtOnce - 1) * threads < count; i += kAtOnce * threads) {
    copy_units<kAtOnce>(src + i, dst + i, place(dst2, i), threads);
  }
  for (; i < count; i += threads) copy_units<1>(src + i, dst + i, place(dst2, i), threads);
}

/// One source, whose bytes are kept: `count` is bytes.
template <int kMost>
RINGLET_BOTH void copy_as_thread(const ReduceWork<kMost>& work, size_t thread, size_t threads) {
  if (work.srcs[0] == work.dst && work.dst2 == nullptr) return;
  const auto range = [&](auto unit, size_t begin, size_t bytes) {
    copy_range<decltype(unit)>(work.srcs[0] + begin, work.dst + begin,
                               work.dst2 == nullptr ? nullptr : work.dst2 + begin, bytes / sizeof unit, thread,
                               threads);
  };
  const auto at = [](const std::byte* p) { return reinterpret_cast<uintptr_t>(p); };
  const size_t packed = work.packs * kPackBytes, after = work.head + packed;
  if (packed != 0) {
    range(uint8_t{}, 0, work.head);
    range(Pack{}, work.head, packed);
    range(uint8_t{}, after, work.count - after);
  } else if ((at(work.srcs[0]) | at(work.dst) | at(work.dst2) | work.count) % sizeof(uint32_t) == 0) {
    range(uint32_t{}, 0, work.count);
  } else {
    range(uint8_t{}, 0, work.count);
  }
}

}  // namespace ringlet::cuda
