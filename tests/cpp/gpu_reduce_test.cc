// The GPU's reductions, compiled for the host and run thread by thread, against the scalar reference, bit for
// bit: every dtype and operation, packs and edges, addresses that agree by 16 and that do not, any number of threads.
#include <sstream>

#include "check.h"
#include "cuda/table.h"
#include "reduce_cases.h"

using namespace ringlet;
using namespace reduce_reference;

namespace {

/// All threads of a grid one after another: what the kernels of cuda/launch.cuh do, with loops for launches.
struct RunReduce {
  using Function = void (*)(const ReduceArgs&, size_t threads);
  template <class E, class Op, int kMost>
  static void all(const ReduceArgs& args, size_t threads) {
    const auto work = cuda::make_work<kMost>(args, sizeof(typename E::Bits));
    for (size_t thread = 0; thread < threads; ++thread) cuda::reduce_as_thread<E, Op, kMost>(work, thread, threads);
  }
  template <class E, class Op>
  static Function get() {
    return [](const ReduceArgs& args, size_t threads) {
      const bool pair = args.n == 2 && args.scaled_source < 0 && args.divisor == 1;
      pair ? all<E, Op, 2>(args, threads) : all<E, Op, cuda::kMostSources>(args, threads);
    };
  }
};

RunReduce::Function find_reduce(DType dtype, ReduceOp op) {
  if (!supports(dtype, op)) return nullptr;
  if (const auto run = cuda::find_float<RunReduce>(dtype, op)) return run;
  if (const auto run = cuda::find_float8<RunReduce>(dtype, op)) return run;
  return cuda::find_other<RunReduce>(dtype, op);
}

void reduce(DType dtype, ReduceOp op, const ReduceArgs& args, size_t threads) {
  const cuda::Counted counted = cuda::in_counted(args, dtype, op);
  (counted.copies ? find_reduce(DType::uint8, ReduceOp::bor) : find_reduce(dtype, op))(counted.args, threads);
}

TEST(test_table) {
  for (int d = 0; d < kDTypes; ++d) {
    for (int o = 0; o < kReduceOps; ++o) {
      const auto dtype = static_cast<DType>(d);
      const auto op = static_cast<ReduceOp>(o);
      CHECK_EQ(find_reduce(dtype, op) != nullptr, supports(dtype, op));
      const int tables = (cuda::find_float<RunReduce>(dtype, op) != nullptr) +
                         (cuda::find_float8<RunReduce>(dtype, op) != nullptr) +
                         (cuda::find_other<RunReduce>(dtype, op) != nullptr);
      if (supports(dtype, op)) CHECK_EQ(tables, 1);
    }
  }
}

struct Case {
  DType dtype;
  ReduceOp op;
  const std::vector<Bytes>* srcs;
  Finish finish;
  size_t count;
  size_t offset;  // of the output, in bytes past a line ...
  size_t apart;   // ... and how much further each source lies
  size_t threads;
};

enum Mode { kInPlace, kSeparate, kSecond, kModes };

void run_case(const Case& c, const Bytes& expected, Mode mode) {
  const size_t bytes = c.count * element_size(c.dtype);
  const int n = static_cast<int>(c.srcs->size());
  std::vector<Buffer> buffers;
  std::vector<const std::byte*> srcs;
  buffers.reserve(static_cast<size_t>(n));
  for (int i = 0; i < n; ++i) {
    buffers.emplace_back(bytes, c.offset + c.apart * static_cast<size_t>(i));
    if (bytes > 0) buffers.back().fill((*c.srcs)[static_cast<size_t>(i)]);
    srcs.push_back(buffers.back().data);
  }
  Buffer out(bytes, c.offset), out2(bytes, c.offset);
  Buffer& result = mode == kInPlace ? buffers[c.count % static_cast<size_t>(n)] : out;
  ReduceArgs args{.dst = result.data, .srcs = srcs.data(), .n = n, .count = c.count};
  args.dst2 = mode == kSecond ? out2.data : nullptr;
  args.scaled_source = c.finish.scaled_source;
  args.scale = c.finish.scale;
  args.divisor = c.finish.divisor;
  reduce(c.dtype, c.op, args, c.threads);
  bool ok = result.holds(expected) && result.guards_intact() && out2.guards_intact();
  if (args.dst2 != nullptr) ok = ok && out2.holds(expected);
  std::ostringstream what;
  what << name(c.dtype) << " " << name(c.op) << " n=" << n << " count=" << c.count << " offset=" << c.offset
       << " apart=" << c.apart << " threads=" << c.threads << " mode=" << mode << " divisor=" << c.finish.divisor
       << " scaled_source=" << c.finish.scaled_source;
  check_report(ok, __FILE__, __LINE__, what.str());
}

/// An element's scalars, which its address is a multiple of.
size_t alignment(DType dtype) { return element_size(dtype) / (is_complex(dtype) ? 2 : 1); }

void test_reductions(DType dtype, bool tame, std::mt19937_64& random) {
  constexpr size_t kMost = 1531;
  for (int n : {1, 2, 3, 8}) {
    std::vector<Bytes> srcs;
    for (int i = 0; i < n; ++i) srcs.push_back(random_input(dtype, kMost, tame, random));
    for (int o = 0; o < kReduceOps; ++o) {
      const auto op = static_cast<ReduceOp>(o);
      if (!supports(dtype, op)) continue;
      for (const Finish& finish : finishes(op, n)) {
        const Bytes expected = reference(dtype, op, srcs, finish);
        for (const size_t count : {size_t{0}, size_t{1}, size_t{7}, size_t{64}, kMost}) {
          for (const size_t offset : {size_t{0}, alignment(dtype), 16 - alignment(dtype)}) {
            for (const size_t apart : {size_t{0}, alignment(dtype)}) {
              for (const size_t threads : {size_t{1}, size_t{5}, size_t{96}}) {
                const Case c{dtype, op, &srcs, finish, count, offset % 16, apart, threads};
                run_case(c, expected, static_cast<Mode>((count + offset + apart + threads) % kModes));
              }
            }
          }
        }
      }
    }
  }
}

/// Every code of a small type, scaled: ties, denormals, overflow. The device converts float16 itself; this is what its
/// instructions must agree with.
template <class Code>
void test_rounding(DType dtype, const Format& f) {
  std::vector<Code> codes;
  for (int code = 0; code < 1 << (8 * sizeof(Code)); ++code) codes.push_back(static_cast<Code>(code));
  std::vector<Code> scaled(codes.size());
  for (const float scale : {1.0f, 0.75f, 1.0625f, 1.00390625f, 0x1p-9f, 0x1.8p-10f, 0x1p12f, 1.0009765625f}) {
    const auto* src = reinterpret_cast<const std::byte*>(codes.data());
    ReduceArgs args{.dst = reinterpret_cast<std::byte*>(scaled.data()), .srcs = &src, .n = 1, .count = codes.size()};
    args.scaled_source = 0;
    args.scale = scale;
    reduce(dtype, ReduceOp::premul_sum, args, 256);
    for (const Code code : codes) {
      CHECK_EQ(int(scaled[code]), encode(f, rounded<float>(static_cast<float>(decode(f, code)) * scale)));
    }
  }
}

TEST(every_dtype) {
  std::mt19937_64 random(1);
  for (int d = 0; d < kDTypes; ++d) {
    for (const bool tame : {false, true}) test_reductions(static_cast<DType>(d), tame, random);
  }
  test_rounding<uint16_t>(DType::float16, kFloat16);
  test_rounding<uint16_t>(DType::bfloat16, kBFloat16);
  test_rounding<uint8_t>(DType::float8_e4m3fn, kE4m3fn);
  test_rounding<uint8_t>(DType::float8_e5m2, kE5m2);
}

}  // namespace
