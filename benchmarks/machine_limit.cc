// What two cores of this machine can do without any library, for `python -m benchmarks bench --peers limit`: the time of a cache
// line there and back, the rate at which one core reads what the other has just written, the rate of memory.
//
//     machine_limit PROCESSOR PROCESSOR line ROUNDS | written BYTES ROUNDS | memory BYTES ROUNDS ...
//
// prints a line for each: nanoseconds; 10^9 bytes a second; the same in a copy, and in the sum of two blocks into a third.
// Two threads, one on each of two processors, run the same loop between barriers. A result is the median over rounds of
// the slower thread's time, in the faster of the ways in which the loop is written.
#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif
// The loops in the widest vectors of the machine.
#if defined(__x86_64__) && defined(__GNUC__)
#define RINGLET_WIDEST __attribute__((target_clones("default", "avx2", "avx512f")))
#else
#define RINGLET_WIDEST
#endif

namespace {

using Processors = std::pair<int, int>;
using Clock = std::chrono::steady_clock;
using Line = uint64_t __attribute__((vector_size(64)));

constexpr int kTripsAtOnce = 1000;         // of a line, between two readings of the clock
constexpr size_t kLeastTimed = 256 << 10;  // bytes copied between two readings of the clock
constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kSideBySide = 4;  // parts of a block that one loop reads in turns
constexpr size_t kSkew = 17;       // lines: a load and a store at one place of two pages hold each other up

[[noreturn]] void give_up(const std::string& why) {
  std::fprintf(stderr, "machine_limit: %s\n", why.c_str());
  std::_Exit(1);
}

/// A counter alone on its lines: a processor may fetch lines in pairs.
struct alignas(128) Counter {
  std::atomic<uint64_t> value{0};
};

/// Two threads meet. Each has a processor of its own, so it never yields.
class Meeting {
 public:
  void operator()(int self) {
    const uint64_t turn = arrived_[self].value.load(std::memory_order_relaxed) + 1;
    arrived_[self].value.store(turn, std::memory_order_release);
    while (arrived_[1 - self].value.load(std::memory_order_acquire) < turn) {
    }
  }

 private:
  std::array<Counter, 2> arrived_;
};

/// Anonymous memory in huge pages, if there are any, whose pages are there.
class Block {
 public:
  explicit Block(size_t bytes) : bytes_((bytes + kHugePage - 1) / kHugePage * kHugePage) {
    void* base = ::mmap(nullptr, bytes_ + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED) give_up("mmap of " + std::to_string(bytes_) + " bytes: " + std::strerror(errno));
    base_ = static_cast<std::byte*>(base);
    const auto start = (reinterpret_cast<uintptr_t>(base) + kHugePage - 1) / kHugePage * kHugePage;
    data_ = reinterpret_cast<std::byte*>(start);
    ::madvise(data_, bytes_, MADV_HUGEPAGE);
    std::memset(data_, 1, bytes_);
  }
  ~Block() { ::munmap(base_, bytes_ + kHugePage); }
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;
  std::byte* data() const { return data_; }

 private:
  size_t bytes_;
  std::byte* base_;
  std::byte* data_;
};

/// Runs body(0) and body(1) on threads of their own, each kept on its processor.
template <typename Body>
void on_two(const Processors& processors, const Body& body) {
  const auto run = [&](int self, int processor) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(processor, &set);
    if (const int error = ::pthread_setaffinity_np(::pthread_self(), sizeof set, &set)) {
      give_up("cannot run on processor " + std::to_string(processor) + ": " + std::strerror(error));
    }
    body(self);
  };
  std::thread second([&] { run(1, processors.second); });
  std::thread first([&] { run(0, processors.first); });
  first.join();
  second.join();
}

double nanoseconds_since(Clock::time_point start) {
  return std::chrono::duration<double, std::nano>(Clock::now() - start).count();
}

/// The median over rounds of the slower thread's time.
double slower(const std::array<std::vector<double>, 2>& spent) {
  std::vector<double> rounds(spent[0].size());
  for (size_t r = 0; r < rounds.size(); ++r) rounds[r] = std::max(spent[0][r], spent[1][r]);
  const auto middle = rounds.begin() + static_cast<std::ptrdiff_t>(rounds.size() / 2);
  std::nth_element(rounds.begin(), middle, rounds.end());
  return *middle;
}

/// Each core writes a counter on a line of its own that the other one waits for, as ranks that publish progress do.
double line_round_trip_ns(const Processors& processors, int rounds) {
  std::array<Counter, 2> lines;
  std::array<std::vector<double>, 2> spent;
  on_two(processors, [&](int self) {
    std::atomic<uint64_t>&mine = lines[self].value, &theirs = lines[1 - self].value;
    uint64_t turn = 0;
    for (int r = 0; r < rounds; ++r) {
      const auto start = Clock::now();
      for (int trip = 0; trip < kTripsAtOnce; ++trip) {
        ++turn;
        if (self == 0) mine.store(turn, std::memory_order_release);
        while (theirs.load(std::memory_order_acquire) < turn) {
        }
        if (self == 1) mine.store(turn, std::memory_order_release);
      }
      spent[self].push_back(nanoseconds_since(start) / kTripsAtOnce);
    }
  });
  return slower(spent);
}

/// All lines of a block, combined: one after the other, or from four parts of it in turns.
RINGLET_WIDEST uint64_t read_all(const std::byte* block, size_t bytes, bool side_by_side) {
  const size_t lines = bytes / sizeof(Line), part = side_by_side ? lines / kSideBySide : 1;
  const size_t end = side_by_side ? part : lines, step = side_by_side ? 1 : kSideBySide;
  const auto* from = reinterpret_cast<const Line*>(block);
  Line first{}, second{}, third{}, fourth{};  // an array would not stay in registers
  for (size_t i = 0; i < end; i += step) {
    first ^= from[i];
    second ^= from[i + part];
    third ^= from[i + 2 * part];
    fourth ^= from[i + 3 * part];
  }
  const Line all = (first ^ second) ^ (third ^ fourth);
  return all[0] ^ all[1] ^ all[2] ^ all[3] ^ all[4] ^ all[5] ^ all[6] ^ all[7];
}

/// Both cores write a block each, then both read the other's. `bytes` of a block: a multiple of 256.
double read_written_gbps(const Processors& processors, size_t bytes, int rounds) {
  const std::array<Block, 2> blocks{Block(bytes), Block(bytes)};
  std::array<std::array<std::vector<double>, 2>, 2> spent;  // by way, by thread
  std::atomic<uint64_t> sink{0};
  Meeting meet;
  on_two(processors, [&](int self) {
    for (int r = 0; r < 2 * rounds; ++r) {
      std::memset(blocks[self].data(), r, bytes);
      meet(self);
      const auto start = Clock::now();
      const std::byte* theirs = blocks[1 - self].data();
      const uint64_t found = read_all(theirs, bytes, r % 2 != 0);
      spent[r % 2][self].push_back(nanoseconds_since(start));
      sink.fetch_xor(found, std::memory_order_relaxed);
      meet(self);
    }
  });
  return static_cast<double>(bytes) / std::min(slower(spent[0]), slower(spent[1]));
}

RINGLET_WIDEST void copy(Line* to, const Line* a, size_t lines) {
  for (size_t i = 0; i < lines; ++i) to[i] = a[i];
}

RINGLET_WIDEST void add(Line* to, const Line* a, const Line* b, size_t lines) {
  for (size_t i = 0; i < lines; ++i) to[i] = a[i] + b[i];
}

/// The same past the cache, if the machine can; b null: a copy.
void stream(Line* to, const Line* a, const Line* b, size_t lines) {
#if defined(__x86_64__)
  auto* target = reinterpret_cast<__m128i*>(to);
  const auto *first = reinterpret_cast<const __m128i*>(a), *second = reinterpret_cast<const __m128i*>(b);
  for (size_t i = 0; i < lines * sizeof(Line) / sizeof(__m128i); ++i) {
    _mm_stream_si128(target + i, second != nullptr ? _mm_add_epi64(first[i], second[i]) : first[i]);
  }
  _mm_sfence();
#else
  b != nullptr ? add(to, a, b, lines) : copy(to, a, lines);
#endif
}

/// (copy, read + read + write): both cores at once, each in `bytes` of its own, of which half or a third is written.
std::pair<double, double> memory_gbps(const Processors& processors, size_t bytes, int rounds) {
  const size_t lines = std::max<size_t>(6, bytes / sizeof(Line)), skew = lines > 8 * kSkew ? kSkew : 0;
  const size_t half = (lines - skew) / 2, third = (lines - 2 * skew) / 3;
  const size_t repeats = std::max<size_t>(1, kLeastTimed / (lines * sizeof(Line)));
  const std::array<Block, 2> blocks{Block(lines * sizeof(Line)), Block(lines * sizeof(Line))};
  std::array<std::array<std::vector<double>, 2>, 4> spent;  // by way, by thread
  Meeting meet;
  on_two(processors, [&](int self) {
    auto* const own = reinterpret_cast<Line*>(blocks[self].data());
    for (int r = 0; r < 4 * rounds; ++r) {  // way after way: what streams leaves nothing in the cache
      const int way = r / rounds;
      meet(self);
      const auto start = Clock::now();
      for (size_t again = 0; again < repeats; ++again) {
        if (way == 0) copy(own, own + half + skew, half);
        if (way == 1) stream(own, own + half + skew, nullptr, half);
        if (way == 2) add(own, own + third + skew, own + 2 * (third + skew), third);
        if (way == 3) stream(own, own + third + skew, own + 2 * (third + skew), third);
        std::atomic_signal_fence(std::memory_order_seq_cst);
      }
      spent[way][self].push_back(nanoseconds_since(start) / static_cast<double>(repeats));
    }
  });
  const auto rate = [&](size_t moved, int way) {
    return static_cast<double>(moved * sizeof(Line)) / std::min(slower(spent[way]), slower(spent[way + 1]));
  };
  return {rate(2 * half, 0), rate(3 * third, 2)};
}

}  // namespace

int main(int argc, char** argv) {
  int at = 1;
  const auto number = [&] {
    if (at >= argc) give_up("a number is missing");
    char* end = nullptr;
    const long long found = std::strtoll(argv[at], &end, 10);
    if (*end != '\0' || found < 0) give_up(std::string(argv[at]) + " is no number");
    ++at;
    return found;
  };
  const auto processor = [&] { return static_cast<int>(number()); };
  const int first = processor();
  const Processors processors{first, processor()};
  if (processors.first == processors.second) give_up("a limit needs two different processors");
  while (at < argc) {
    const std::string what = argv[at++];
    const auto bytes = what == "line" ? size_t{256} : static_cast<size_t>(number());
    const int rounds = static_cast<int>(number());
    if (bytes == 0 || rounds < 1) give_up("a limit needs at least 1 byte and 1 round");
    if (what == "line") {
      std::printf("%.17g\n", line_round_trip_ns(processors, rounds));
    } else if (what == "written") {
      if (bytes % (sizeof(Line) * kSideBySide) != 0) give_up("a block must be a multiple of 256 bytes");
      std::printf("%.17g\n", read_written_gbps(processors, bytes, rounds));
    } else if (what == "memory") {
      const auto [copy, sum] = memory_gbps(processors, bytes, rounds);
      std::printf("%.17g %.17g\n", copy, sum);
    } else {
      give_up(what + " is no measurement");
    }
  }
  return 0;
}
