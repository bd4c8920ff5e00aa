// The host kernels against a scalar reference (reduce_reference.h), bit for bit, on every level this machine has.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "base/error.h"
#include "check.h"
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

enum Mode { kInPlace, kSeparate, kSecond, kStreaming, kForPeer, kModes };

struct Case {
  const Level* level;
  DType dtype;
  ReduceOp op;
  const std::vector<Bytes>* srcs;
  Finish finish;
};

void run_case(const Case& c, const Bytes& expected, size_t count, size_t offset, Mode mode) {
  const size_t bytes = count * element_size(c.dtype);
  const int n = static_cast<int>(c.srcs->size());
  std::vector<Buffer> buffers;
  std::vector<const std::byte*> srcs;
  for (int i = 0; i < n; ++i) {
    buffers.emplace_back(bytes, offset * (i % 3));
    if (bytes > 0) buffers.back().fill((*c.srcs)[i]);
  }
  for (Buffer& buffer : buffers) srcs.push_back(buffer.data);
  Buffer out(bytes, offset), out2(bytes, offset * 2);
  const int own = static_cast<int>(count % n);  // in place: any of the sources
  Buffer& result = mode == kInPlace ? buffers[own] : out;
  ReduceArgs args{.dst = result.data, .srcs = srcs.data(), .n = n, .count = count};
  args.dst2 = mode == kSecond || (mode == kStreaming && count % 2 == 1) ? out2.data : nullptr;
  args.scaled_source = c.finish.scaled_source;
  args.scale = c.finish.scale;
  args.divisor = c.finish.divisor;
  if (mode == kStreaming) args.next = NextReader::nobody;
  if (mode == kForPeer) args.next = NextReader::peer;
  c.level->kernel(c.dtype, c.op)(args);
  bool ok = result.holds(expected) && result.guards_intact() && out2.guards_intact();
  if (args.dst2 != nullptr) ok = ok && out2.holds(expected);
  if (!ok) {
    std::ostringstream what;
    what << c.level->name << " " << name(c.dtype) << " " << name(c.op) << " n=" << n << " count=" << count
         << " offset=" << offset << " mode=" << mode << " divisor=" << c.finish.divisor
         << " scaled_source=" << c.finish.scaled_source;
    check_report(false, __FILE__, __LINE__, what.str());
  }
}

/// Every operation, level, finish and mode; `counts` ascend.
void test_kernels(DType dtype, const std::vector<size_t>& counts, std::initializer_list<int> sources) {
  std::mt19937_64 random(1);
  [[maybe_unused]] int number = 0;
  for (int n : sources) {
    for (bool tame : {false, true}) {
      std::vector<Bytes> srcs;
      for (int i = 0; i < n; ++i) srcs.push_back(random_input(dtype, counts.back(), tame, random));
      for (int o = 0; o < kReduceOps; ++o) {
        const auto op = static_cast<ReduceOp>(o);
        if (!supports(dtype, op)) continue;
        for (const Finish& finish : finishes(op, n)) {
          const Bytes expected = reference(dtype, op, srcs, finish);
          for (const Level* level : available_levels()) {
            for (size_t count : counts) {
              for (size_t misalignment : {size_t{0}, element_size(dtype), size_t{1}}) {
                for (int mode = 0; mode < kModes; ++mode) {
                  if (kSanitized && number++ % 7 != 0) continue;
                  run_case({level, dtype, op, &srcs, finish}, expected, count, misalignment, static_cast<Mode>(mode));
                }
              }
            }
          }
        }
      }
    }
  }
}

/// One source, scaled: decode, multiply, encode; so the kernel's conversions alone.
template <class Code>
std::vector<Code> converted(const Level& level, DType dtype, const std::vector<Code>& codes, double scale) {
  std::vector<Code> out(codes.size());
  const auto* src = reinterpret_cast<const std::byte*>(codes.data());
  ReduceArgs args{.dst = reinterpret_cast<std::byte*>(out.data()), .srcs = &src, .n = 1, .count = codes.size()};
  args.scaled_source = 0;
  args.scale = scale;
  level.kernel(dtype, ReduceOp::premul_sum)(args);
  return out;
}

/// Every code of a small type survives; and after a scale that makes ties, denormals and overflow, rounds as the
/// reference.
template <class Code>
void test_conversions(DType dtype, const Format& f) {
  std::vector<Code> codes;
  for (int code = 0; code < 1 << (8 * sizeof(Code)); ++code) codes.push_back(static_cast<Code>(code));
  for (const Level* level : available_levels()) {
    const auto same = converted(*level, dtype, codes, 1.0);
    for (Code code : codes) {
      const bool nan = std::isnan(decode(f, code));
      CHECK_EQ(int(same[code]), nan ? f.nan : int(code));
    }
    for (const float scale : {0.5f, 0.75f, 1.0625f, 1.5f, 1.00390625f, 0x1p-9f, 0x1.8p-10f, 0x1p12f, 1.0009765625f}) {
      const auto scaled = converted(*level, dtype, codes, scale);
      for (Code code : codes) {
        CHECK_EQ(int(scaled[code]), encode(f, rounded<float>(static_cast<float>(decode(f, code)) * scale)));
      }
    }
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
    for (const Level* level : available_levels())
      run_case({level, dtype, op, &srcs, {}}, expected, 65536, 0, kSeparate);
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
      }
    }
  }
}

TEST(test_small_types) {
  test_conversions<uint8_t>(DType::float8_e4m3fn, kE4m3fn);
  test_conversions<uint8_t>(DType::float8_e5m2, kE5m2);
  test_conversions<uint16_t>(DType::float16, kFloat16);
  test_conversions<uint16_t>(DType::bfloat16, kBFloat16);
  test_float8_pairs(DType::float8_e4m3fn, kE4m3fn);
  test_float8_pairs(DType::float8_e5m2, kE5m2);
}

}  // namespace
