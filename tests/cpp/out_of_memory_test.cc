// Memory that runs out at the n-th allocation of a call on rank 0, for every n: each rank gets an error or the right
// bits, nobody waits for a deadline, and afterwards the group has failed on all ranks or on none. The same for the thread
// that makes connections, which no program could go on without.
#include <pthread.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <latch>
#include <new>
#include <utility>

#include "check.h"
#include "ranks.h"

namespace {

std::atomic<bool> armed{false};
std::atomic<int> left{0};           // allocations of rank 0's threads that still succeed
std::atomic<bool> for_good{false};  // then all later ones fail, too
std::atomic<int> refused{0};
thread_local bool counted = false;
thread_local int wanted = -1;  // on rank 0: which allocation fails

/// Called just before the library: what the test itself allocates is not counted.
void arm() {
  if (wanted < 0) return;
  left = std::exchange(wanted, -1);
  counted = armed = true;
}

std::atomic<bool> connecting{false};  // instead of rank 0's threads: the one that makes connections, of all ranks

/// Rank 0's threads are its caller's, and those that its group has started: the other ranks start none.
bool is_counted() {
  char name[16] = "";
  ::pthread_getname_np(::pthread_self(), name, sizeof name);
  if (connecting) return std::strcmp(name, "ringlet-tcp") == 0;
  return counted || std::strcmp(name, "ringlet") == 0 || std::strcmp(name, "ringlet-p2p") == 0;
}

bool refuses() {
  if (!armed || !is_counted()) return false;
  const int before = left--;
  if (before > 0 || (before < 0 && !for_good)) return false;
  ++refused;
  return true;
}

void* allocate(size_t bytes, size_t alignment) {
  if (refuses()) throw std::bad_alloc();
  bytes = (std::max<size_t>(bytes, 1) + alignment - 1) / alignment * alignment;
  if (void* memory = std::aligned_alloc(alignment, bytes)) return memory;
  throw std::bad_alloc();
}

}  // namespace

[[gnu::noinline]] void* operator new(size_t bytes) { return allocate(bytes, alignof(std::max_align_t)); }
[[gnu::noinline]] void* operator new(size_t bytes, std::align_val_t alignment) {
  return allocate(bytes, static_cast<size_t>(alignment));
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, size_t) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, size_t, std::align_val_t) noexcept { std::free(memory); }

using namespace ringlet;

namespace {

constexpr auto kNever = std::chrono::seconds(20);  // a wait that lasts so long is a failed check

using Values = std::vector<float>;
std::byte* bytes(Values& floats) { return reinterpret_cast<std::byte*>(floats.data()); }

/// What a rank does; it says whether the result is right. Rank 0's tensors live as long as the group.
struct Case {
  const char* name;
  size_t count;
  std::function<bool(Communicator&, Values& data, size_t count)> act;
};

Call all_reduce(Values& data, size_t count) {
  return {.collective = Collective::all_reduce,
          .dtype = DType::float32,
          .count = count,
          .input = bytes(data),
          .output = bytes(data)};
}

bool are(const Values& data, size_t count, float value) {
  return std::all_of(data.begin(), data.begin() + static_cast<std::ptrdiff_t>(count),
                     [&](float each) { return each == value; });
}

bool reduced(const Communicator& group, const Values& data, size_t count) {
  return are(data, count, static_cast<float>(group.world()));
}

bool calls(Communicator& group, Values& data, size_t count) {
  arm();
  group.run(all_reduce(data, count));
  return reduced(group, data, count);
}

bool broadcasts(Communicator& group, Values& data, size_t count) {
  if (group.rank() == 0) std::fill(data.begin(), data.end(), 7.0f);
  Call call = all_reduce(data, count);
  call.collective = Collective::broadcast;
  arm();
  group.run(call);
  return are(data, count, 7.0f);
}

bool starts(Communicator& group, Values& data, size_t count) {
  if (group.rank() != 0) return calls(group, data, count);
  arm();
  group.start(all_reduce(data, count), nullptr)->wait(kNever);
  return reduced(group, data, count);
}

bool starts_several(Communicator& group, Values& data, size_t count) {
  const size_t half = count / 2;
  Call first = all_reduce(data, half), second = all_reduce(data, count - half);
  second.input = second.output = bytes(data) + half * sizeof(float);
  if (group.rank() == 0) {
    std::vector<Call> both{first, second};
    arm();
    group.start(std::move(both), nullptr)->wait(kNever);
  } else {
    group.run([&](const std::function<void(Call)>& run) { run(first), run(second); });
  }
  return reduced(group, data, count);
}

bool runs_a_job(Communicator& group, Values& data, size_t count) {
  Communicator::Job job = [&](const std::function<void(Call)>& run) {
    run(all_reduce(data, count));
    if (group.rank() == 0) const auto scratch = std::make_unique<char[]>(100);
    run({.collective = Collective::barrier});
  };
  arm();
  group.rank() == 0 ? group.start(std::move(job), nullptr)->wait(kNever) : group.run(job);
  return reduced(group, data, count);
}

/// Each rank sends as many elements to rank q as q is large.
bool exchanges_blocks(Communicator& group, Values& data, size_t) {
  const size_t world = static_cast<size_t>(group.world()), rank = static_cast<size_t>(group.rank());
  Values received(world * (rank + 1), 0.0f);
  Blocks blocks;
  for (size_t q = 0; q < world; ++q) {
    blocks.inputs.push_back(bytes(data) + q * world * sizeof(float));
    blocks.counts.push_back(q + 1);
  }
  for (size_t q = 0; q < world; ++q) {
    blocks.outputs.push_back(bytes(received) + q * (rank + 1) * sizeof(float));
    blocks.counts.push_back(rank + 1);
  }
  blocks.longest = world;
  blocks.uneven = true;
  Call call{.collective = Collective::all_to_all, .dtype = DType::float32, .count = world};
  call.blocks = &blocks;
  arm();
  group.run(call);
  return are(received, received.size(), 1.0f);
}

template <int sender>
bool passes(Communicator& group, Values& data, size_t count) {
  const bool sends = group.rank() == sender;
  if (sends) std::fill(data.begin(), data.end(), 7.0f);
  arm();
  if (group.rank() < 2) group.run(Message{1 - group.rank(), sends, DType::float32, count, bytes(data), {}});
  return group.rank() > 1 || are(data, count, 7.0f);
}

bool starts_messages(Communicator& group, Values& data, size_t count) {
  const size_t half = count / 2;
  const bool first = group.rank() == 0;
  if (group.rank() > 1) return true;
  Message out{1 - group.rank(), true, DType::float32, half, bytes(data), {}};
  Message in{1 - group.rank(), false, DType::float32, count - half, bytes(data) + half * sizeof(float), {}};
  if (!first) out.count = count - half, in.count = half, in.data = bytes(data) + (count - half) * sizeof(float);
  if (first) {
    arm();
    const auto sent = group.start(out, nullptr);
    const auto received = group.start(in, nullptr);
    sent->wait(kNever), received->wait(kNever);
  } else {
    group.run(in), group.run(out);
  }
  return are(data, count, 1.0f);
}

const Case kCases[] = {
    {"all_reduce", 1000, calls},
    {"long all_reduce", 400'000, calls},
    {"broadcast", 1000, broadcasts},
    {"all_reduce, started", 1000, starts},
    {"two started together", 100'000, starts_several},
    {"a job", 1000, runs_a_job},
    {"all_to_all of blocks", 1000, exchanges_blocks},
    {"send", 1000, passes<0>},
    {"long send", 400'000, passes<0>},
    {"recv", 1000, passes<1>},
    {"long recv", 400'000, passes<1>},
    {"messages, started", 1000, starts_messages},
};

enum class Outcome { right, wrong, error, timeout };

template <typename Do>
Outcome outcome_of(const Do& act, std::string& text) {
  try {
    return act() ? Outcome::right : Outcome::wrong;
  } catch (const Timeout& error) {
    text = error.what();
    return Outcome::timeout;
  } catch (const std::exception& error) {
    text = error.what();
    return Outcome::error;
  }
}

/// Whether an allocation was refused.
bool try_one(const Case& of, Between between, int world, int n, bool later_too) {
  const auto size = static_cast<size_t>(world);
  std::vector<Outcome> first(size), second(size);
  std::vector<std::string> texts(size);
  std::latch made(world), called(world), again(world);
  refused = 0;
  for_good = later_too;
  const auto try_on = [&](Communicator& group) {
    const auto rank = static_cast<size_t>(group.rank());
    Values data(of.count, 1.0f), more(10, 1.0f);
    std::string text;
    text.reserve(4096);
    made.arrive_and_wait();
    if (rank == 0) wanted = n;
    first[rank] = outcome_of([&] { return of.act(group, data, of.count); }, text);
    if (rank == 0) armed = counted = false;
    texts[rank] = text;
    called.arrive_and_wait();  // rank 0 stays until all have heard
    second[rank] = outcome_of([&] { return calls(group, more, more.size()); }, text);
    again.arrive_and_wait();
  };
  run_well(world, between, try_on, kNever);
  const bool all_right = std::all_of(first.begin(), first.end(), [](Outcome each) { return each == Outcome::right; });
  for (size_t rank = 0; rank < size; ++rank) {
    const std::string where = std::string(of.name) + " over " + std::to_string(static_cast<int>(between)) + ", n " +
                              std::to_string(n) + (later_too ? " and later" : "") + ", rank " + std::to_string(rank) +
                              ": " + texts[rank];
    const auto check = [&](bool good, const char* what) {
      check_report(good, __FILE__, __LINE__, what + (" " + where));
    };
    check(first[rank] != Outcome::wrong, "wrong bits");
    check(first[rank] != Outcome::timeout && second[rank] != Outcome::timeout, "waited in vain");
    check(second[rank] == (all_right ? Outcome::right : Outcome::error), all_right ? "fails" : "goes on");
  }
  return refused > 0;
}

/// Whether an allocation was refused while connections were made.
bool connect(int n) {
  std::array<Outcome, 2> outcomes{};
  std::array<std::string, 2> texts;
  std::latch called(2);
  refused = 0;
  left = n;
  for_good = false;
  connecting = armed = true;
  const auto connects = [&](Communicator& group) {
    Values data(1000, 1.0f);
    const auto rank = static_cast<size_t>(group.rank());
    const auto sum = [&] {
      group.run(all_reduce(data, data.size()));
      return reduced(group, data, data.size());
    };
    outcomes[rank] = outcome_of(sum, texts[rank]);
    called.arrive_and_wait();
  };
  run_well(2, Between::tcp, connects, kNever);
  armed = connecting = false;
  for (size_t rank = 0; rank < 2; ++rank) {
    const std::string what = "n " + std::to_string(n) + ", rank " + std::to_string(rank) + ": " + texts[rank];
    check_report(outcomes[rank] == Outcome::right || outcomes[rank] == Outcome::error, __FILE__, __LINE__, what);
  }
  return refused > 0;
}

/// Whether an allocation was refused while rank 0 left its group, in which a message of its own was pending.
bool leave(Between between, int n, bool later_too) {
  static int generation = 0;
  const std::string name = "leaving-" + std::to_string(++generation);
  const Token key = random_token();
  std::latch called(2);
  std::vector<std::thread> ranks;
  refused = 0;
  for_good = later_too;
  std::string text;
  Outcome left = Outcome::right;
  for (int rank = 0; rank < 2; ++rank) {
    ranks.emplace_back([&, rank] {
      Values data(1000, 1.0f), late(10);
      auto group = std::make_unique<Communicator>(make_engine(name, rank, 2, between, key), kNever);
      group->run(all_reduce(data, data.size()));
      if (rank == 0) group->start(Message{1, false, DType::float32, late.size(), bytes(late), {}}, nullptr);
      called.arrive_and_wait();
      if (rank == 0) {
        wanted = n;
        arm();
        try {
          group->close(std::chrono::milliseconds(0));
        } catch (const std::bad_alloc&) {  // the end goes on
        }
        group.reset();
        armed = counted = false;
      } else {
        left = outcome_of([&] { return group->run(all_reduce(data, data.size())), false; }, text);
      }
    });
  }
  for (std::thread& rank : ranks) rank.join();
  const std::string where = " over " + std::to_string(static_cast<int>(between)) + ", n " + std::to_string(n);
  check_report(left == Outcome::error, __FILE__, __LINE__, "the other rank" + where + ": " + text);
  return refused > 0;
}

TEST(a_group_ends_without_memory) {
  for (const Between between : {Between::one_memory, Between::stages, Between::tcp, Between::mixed}) {
    for (const bool later_too : {false, true}) {
      for (int n = 0; leave(between, n, later_too); ++n) {
      }
    }
  }
}

TEST(connections_are_made_or_refused_without_memory) {
  for (int n = 0; connect(n); ++n) {
  }
}

TEST(every_allocation_may_fail) {
  int number = 0;
  for (const Between between : {Between::one_memory, Between::stages, Between::tcp, Between::mixed}) {
    for (const Case& each : kCases) {
      for (const bool later_too : {false, true}) {
        const int world = between == Between::mixed ? 3 : 2, step = kSanitized ? 23 : few_cases() ? 5 : 1;
        int n = number++ % step;
        while (try_one(each, between, world, n, later_too)) n += step;
        if (check_failures > 0)
          std::fprintf(stderr, "%s over %d: up to n %d\n", each.name, static_cast<int>(between), n);
      }
    }
  }
}

}  // namespace
