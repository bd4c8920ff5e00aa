// The kernels against a scalar reference (reduce_reference.h), bit for bit: the host's on every level this machine has,
// and the GPU's, compiled for the host and run thread by thread.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <vector>

#include "base/error.h"
#include "check.h"
#include "cuda/table.h"
#include "reduce/level.h"
#include "reduce_cases.h"

using namespace ringlet;
using namespace reduce_reference;

namespace {

/// First: it fixes what this process chooses.
TEST(test_choice) {
  const auto& levels = available_levels();
  CHECK_EQ(std::string(levels.back()->name), "portable");
  CHECK_EQ(std::string(choose_level(nullptr).name), levels.front()->name);
  CHECK_EQ(std::string(choose_level("").name), levels.front()->name);
  for (const Level* level : levels) CHECK(&choose_level(level->name) == level);
  CHECK_HAS(CHECK_THROWS(InvalidUsage, choose_level("sse9")), "RINGLET_CPU_KERNELS=\"sse9\" is not one of", "portable");

  setenv("RINGLET_CPU_KERNELS", "portable", 1);
  check_cpu_kernels();
  CHECK_EQ(std::string(cpu_kernels()), "portable");
  setenv("RINGLET_CPU_KERNELS", "nonsense", 1);
  CHECK_THROWS(InvalidUsage, check_cpu_kernels());
  unsetenv("RINGLET_CPU_KERNELS");
  CHECK_EQ(std::string(cpu_kernels()), "portable");  // chosen once
}

/// The host's kernels of one level, or a GPU's as the host compiles them.
struct Kernels {
  std::string name;
  std::function<void(DType, ReduceOp, const ReduceArgs&)> run;
};

std::vector<Kernels> host_kernels() {
  std::vector<Kernels> all;
  for (const Level* level : available_levels()) {
    all.push_back(
        {level->name, [level](DType dtype, ReduceOp op, const ReduceArgs& args) { level->kernel(dtype, op)(args); }});
  }
  return all;
}

/// All threads of a grid one after another: what the kernels of cuda/launch.cuh do, with loops for launches.
struct RunReduce {
  using Function = void (*)(const ReduceArgs&, ReduceOp, size_t threads);
  template <class E, class Ops, int kMost>
  static void all(const ReduceArgs& args, ReduceOp op, size_t threads) {
    const auto work = cuda::make_work<kMost>(args, op, sizeof(typename E::Bits));
    for (size_t thread = 0; thread < threads; ++thread) cuda::reduce_as_thread<E, Ops, kMost>(work, thread, threads);
  }
  template <class E, class Ops>
  static Function get() {
    return [](const ReduceArgs& args, ReduceOp op, size_t threads) {
      const bool pair = args.n == 2 && args.scaled_source < 0 && args.divisor == 1;
      pair ? all<E, Ops, 2>(args, op, threads) : all<E, Ops, cuda::kMostSources>(args, op, threads);
    };
  }
};

/// In which of the tables of the GPU's library a kernel is: the last, or null.
RunReduce::Function gpu_kernel(DType dtype, ReduceOp op, int* tables = nullptr) {
  RunReduce::Function found = nullptr;
  for (const auto one : {cuda::find_float<RunReduce>(dtype, op), cuda::find_float8<RunReduce>(dtype, op),
                         cuda::find_other<RunReduce>(dtype, op)}) {
    if (one != nullptr) found = one;
    if (one != nullptr && tables != nullptr) ++*tables;
  }
  return found;
}

Kernels gpu_kernels(size_t threads) {
  return {"GPU, " + std::to_string(threads) + " threads", [threads](DType dtype, ReduceOp op, const ReduceArgs& args) {
            const cuda::Counted counted = cuda::in_counted(args, dtype, op);
            (counted.copies ? gpu_kernel(DType::uint8, ReduceOp::bor) : gpu_kernel(dtype, op))(counted.args, op,
                                                                                               threads);
          }};
}

void check_reduction(const Kernels& kernels, const Reduction& c, const Bytes& expected) {
  const std::string wrong =
      wrong_after(c, expected, [&](const ReduceArgs& args, auto&) { kernels.run(c.dtype, c.op, args); });
  if (!wrong.empty()) check_report(false, __FILE__, __LINE__, kernels.name + " " + wrong);
}

/// With each number of sources `act` for every operation and finish.
void each_reduction(DType dtype, size_t most, std::initializer_list<int> sources,
                    const std::function<void(ReduceOp, const std::vector<Bytes>&, const Finish&, const Bytes&)>& act) {
  std::mt19937_64 random(1);
  for (int n : sources) {
    for (bool tame : {false, true}) {
      std::vector<Bytes> srcs;
      for (int i = 0; i < n; ++i) srcs.push_back(random_input(dtype, most, tame, random));
      for (int o = 0; o < kReduceOps; ++o) {
        const auto op = static_cast<ReduceOp>(o);
        if (!supports(dtype, op)) continue;
        for (const Finish& finish : finishes(op, n)) act(op, srcs, finish, reference(dtype, op, srcs, finish));
      }
    }
  }
}

/// Of like cases a sanitizer sees every seventeenth: it looks for what a kernel touches, not for what it computes.
bool is_chosen() {
  static int number = 0;
  return !kSanitized || number++ % 17 == 0;
}

/// Every level, finish and way to write; `counts` ascend.
void test_kernels(DType dtype, const std::vector<size_t>& counts, std::initializer_list<int> sources) {
  struct Way {
    Into into;
    NextReader next;
  };
  static constexpr Way kWays[] = {{Into::source, NextReader::self}, {Into::other, NextReader::self},
                                  {Into::both, NextReader::self},   {Into::other, NextReader::nobody},
                                  {Into::both, NextReader::nobody}, {Into::other, NextReader::peer}};
  const std::vector<Kernels> all = host_kernels();
  each_reduction(
      dtype, counts.back(), sources, [&](ReduceOp op, const auto& srcs, const Finish& finish, const Bytes& expected) {
        for (const Kernels& kernels : all) {
          for (size_t count : counts) {
            for (size_t misalignment : {size_t{0}, element_size(dtype), size_t{1}}) {
              for (const auto& [into, next] : kWays) {
                if (next == NextReader::nobody && (into == Into::both) != (count % 2 == 1)) continue;  // one of the two
                if (!is_chosen()) continue;
                check_reduction(kernels, {dtype, op, srcs, finish, count, misalignment, misalignment, into, next},
                                expected);
              }
            }
          }
        }
      });
}

/// Packs and edges, addresses that agree by 16 and that do not, any number of threads.
void test_gpu_kernels(DType dtype) {
  constexpr size_t kMost = 1531;
  const Kernels few[] = {gpu_kernels(1), gpu_kernels(5), gpu_kernels(96)};
  const size_t unit = alignment(dtype);
  each_reduction(dtype, kMost, {1, 2, 3, 8},
                 [&](ReduceOp op, const auto& srcs, const Finish& finish, const Bytes& expected) {
                   for (const size_t count : {size_t{0}, size_t{1}, size_t{7}, size_t{64}, kMost}) {
                     for (const size_t offset : {size_t{0}, unit, (16 - unit) % 16}) {
                       for (const size_t apart : {size_t{0}, unit}) {
                         for (size_t t = 0; t < std::size(few); ++t) {
                           if (!is_chosen()) continue;
                           const auto into = static_cast<Into>((count + offset + apart + t) % 3);
                           check_reduction(few[t], {dtype, op, srcs, finish, count, offset, apart, into}, expected);
                         }
                       }
                     }
                   }
                 });
}

/// One source, scaled: decode, multiply, encode; so the kernel's conversions alone. A GPU converts float16 by instructions
/// of its own, which must agree with this.
void test_conversions(const Kernels& kernels, DType dtype) {
  const std::vector<Bytes> codes{all_codes(dtype)};
  const size_t count = codes[0].size() / element_size(dtype);
  for (const float scale : kRoundingScales) {
    const Finish finish{0, scale, 1};
    check_reduction(kernels, {dtype, ReduceOp::premul_sum, codes, finish, count},
                    reference(dtype, ReduceOp::premul_sum, codes, finish));
  }
}

/// All pairs of float8, so all sums that two can make.
void test_float8_pairs(DType dtype, const Format& f) {
  std::vector<Bytes> srcs(2, Bytes(65536));
  for (int i = 0; i < 65536; ++i) {
    srcs[0][i] = static_cast<std::byte>(i & 0xff);
    srcs[1][i] = static_cast<std::byte>(i >> 8);
  }
  for (ReduceOp op : {ReduceOp::sum, ReduceOp::product, ReduceOp::min, ReduceOp::max}) {
    const Bytes expected = reference(dtype, op, srcs, {});
    for (const Kernels& kernels : host_kernels()) check_reduction(kernels, {dtype, op, srcs, {}, 65536}, expected);
  }
  CHECK_EQ(encode(f, f.saturates ? 464.1 : 61440.0), f.saturates ? 0x7e : 0x7c);  // torch 2.13's limits
}

/// Sources that end where memory ends, or begin where it begins: no kernel reads a byte too many.
TEST(test_page_edges) {
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  auto* area = static_cast<std::byte*>(mmap(nullptr, 3 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  CHECK(area != MAP_FAILED && mprotect(area + page, page, PROT_READ | PROT_WRITE) == 0);
  std::memset(area + page, 0, page);
  Bytes out(page);
  for (const Level* level : available_levels()) {
    for (int d = 0; d < kDTypes; ++d) {
      const auto dtype = static_cast<DType>(d);
      if (!supports(dtype, ReduceOp::sum)) continue;
      for (size_t count = 0; count <= 150; ++count) {
        for (bool at_end : {false, true}) {
          std::byte* edge = at_end ? area + 2 * page - count * element_size(dtype) : area + page;
          const std::byte* srcs[] = {edge, edge, edge};
          for (int n : {1, 2, 3}) {
            level->kernel(dtype, ReduceOp::sum)({.dst = out.data(), .srcs = srcs, .n = n, .count = count});
            level->kernel(dtype, ReduceOp::sum)({.dst = edge, .srcs = srcs, .n = n, .count = count});
          }
        }
      }
    }
  }
  CHECK(std::all_of(out.begin(), out.end(), [](std::byte b) { return b == std::byte{0}; }));
  munmap(area, 3 * page);
}

TEST(test_all_kernels) {
  for (int d = 0; d < kDTypes; ++d) {
    const auto dtype = static_cast<DType>(d);
    test_kernels(dtype, {0, 1, 2, 7, 63, 64, 65, 1023, 4099}, {1, 2, 3, 5, 8});
    const size_t side_by_side = kSideBySideBytes / element_size(dtype);
    test_kernels(dtype, {side_by_side - 1, side_by_side, side_by_side * 3 / 2 + 7}, {1, 2, 3});
    test_gpu_kernels(dtype);
  }
}

TEST(test_copies) {
  std::mt19937_64 random(2);
  for (size_t bytes : {size_t{0}, size_t{1}, size_t{15}, size_t{64}, size_t{1000}, size_t{4099}, size_t{100003}}) {
    const Bytes from = random_input(DType::uint8, bytes, false, random);
    for (size_t offset : {size_t{0}, size_t{1}, size_t{33}}) {
      for (NextReader next : {NextReader::self, NextReader::peer, NextReader::nobody}) {
        Buffer to(bytes, offset);
        copy_bytes(to.data, from.data(), bytes, next);
        CHECK(bytes == 0 || to.holds(from));
        CHECK(to.guards_intact());
      }
    }
  }
}

/// a op b and b op a agree to the bit, NaN signs and payloads and zeros' signs included.
TEST(test_commutes) {
  std::mt19937_64 random(3);
  for (const Level* level : available_levels()) {
    for (DType dtype : {DType::float64, DType::float32, DType::float16, DType::bfloat16, DType::complex64}) {
      for (ReduceOp op : {ReduceOp::sum, ReduceOp::product, ReduceOp::min, ReduceOp::max}) {
        if (!supports(dtype, op)) continue;
        Bytes a = random_input(dtype, 4096, false, random), b = random_input(dtype, 4096, false, random);
        for (size_t i = 0; i < a.size(); i += 5) a[i] = b[i] = std::byte{0xff};  // many NaNs
        std::memset(a.data(), 0, 512);
        std::memset(b.data(), 0, 512);
        for (size_t i = element_size(dtype) - 1; i < 512; i += element_size(dtype)) b[i] = std::byte{0x80};  // -0
        Bytes forward(a.size()), backward(a.size());
        const std::byte *ab[] = {a.data(), b.data()}, *ba[] = {b.data(), a.data()};
        level->kernel(dtype, op)({.dst = forward.data(), .srcs = ab, .n = 2, .count = 4096});
        level->kernel(dtype, op)({.dst = backward.data(), .srcs = ba, .n = 2, .count = 4096});
        CHECK(forward == backward);
      }
    }
  }
}

TEST(test_table) {
  for (const Level* level : available_levels()) {
    for (int d = 0; d < kDTypes; ++d) {
      for (int o = 0; o < kReduceOps; ++o) {
        const auto dtype = static_cast<DType>(d);
        const auto op = static_cast<ReduceOp>(o);
        CHECK_EQ(level->kernel(dtype, op) != nullptr, supports(dtype, op));
        CHECK_EQ(reduce_kernel(dtype, op) != nullptr, supports(dtype, op));
        int tables = 0;
        if (supports(dtype, op)) CHECK(gpu_kernel(dtype, op, &tables) != nullptr && tables == 1);
      }
    }
  }
}

TEST(test_small_types) {
  std::vector<Kernels> all = host_kernels();
  all.push_back(gpu_kernels(256));
  for (const DType dtype : kSmallFloats) {
    for (const Kernels& kernels : all) test_conversions(kernels, dtype);
  }
  test_float8_pairs(DType::float8_e4m3fn, kE4m3fn);
  test_float8_pairs(DType::float8_e5m2, kE5m2);
}

}  // namespace
