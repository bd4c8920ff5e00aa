// Groups made and closed over and over, in a heap that has room for a few: what a group took is there for the next one.
#include <algorithm>
#include <barrier>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <thread>

#include "base/processor.h"
#include "check.h"
#include "comm/communicator.h"
#include "engine/message/message_engine.h"
#include "engine/pull/pull_engine.h"
#include "floats.h"
#include "memory/heap.h"
#include "mesh_group.h"
#include "transport/in_process.h"

using namespace ringlet;

namespace {

[[maybe_unused]] const int small_heap = ::setenv("RINGLET_HEAP_MIB", "64", 1);
constexpr int kCycles = kSanitized ? 60 : 300;
constexpr auto kSoon = std::chrono::seconds(60);

size_t descriptors() {
  const auto open = std::filesystem::directory_iterator("/proc/self/fd");
  return static_cast<size_t>(std::distance(begin(open), end(open)));
}

/// A group in shared memory, all of it, or that of one host between whose ranks are rings.
std::unique_ptr<Communicator> join(Store& store, const std::string& name, int rank, bool rings) {
  const Deadline soon = Deadline::after(kSoon);
  std::unique_ptr<Engine> engine;
  if (!rings) {
    engine = std::make_unique<PullEngine>(connect_shared_memory(store, name, rank, 2, soon));
  } else {
    Mesh::Setup setup{.rank = rank, .world = 2, .addresses = {Mesh::address(), Mesh::address()}, .hosts = {0, 0}};
    std::copy_n(name.begin(), std::min(name.size(), setup.key.size()), setup.key.begin());
    setup.local = connect_shared_memory(store, name, rank, 2, soon, Rings::all);
    std::vector<int> hosts{0, 0};
    Topology topology(hosts);
    engine = std::make_unique<MessageEngine>(std::make_unique<Mesh>(std::move(setup)), std::move(hosts),
                                             std::move(topology), "rings");
  }
  return std::make_unique<Communicator>(std::move(engine), kSoon);
}

void use(Communicator& group) {
  Floats data, other;
  group.run(data.sum());
  CHECK_EQ(data.values[999], 2.0f);
  const int peer = 1 - group.rank();
  const auto sent = group.start(data.message(peer, true), nullptr);
  group.run(other.message(peer, false));
  sent->wait(kSoon);
  CHECK_EQ(other.values[999], 2.0f);
}

/// On two threads; what they throw is a failed check.
void both_ranks(const std::function<void(int)>& body) {
  const auto checked = [&](int rank) {
    try {
      body(rank);
    } catch (const std::exception& error) {
      check_report(false, __FILE__, __LINE__, error.what());
      std::_Exit(1);  // the other would wait for this one
    }
  };
  std::thread other(checked, 1);
  checked(0);
  other.join();
}

/// `body(rank, cycle, group)` ends the group or keeps it.
void cycles(const std::string& name, int count, bool rings,
            const std::function<void(int, int, std::unique_ptr<Communicator>)>& body) {
  ThreadStore store;
  both_ranks([&](int rank) {
    for (int cycle = 0; cycle < count; ++cycle) {
      auto group = join(store, name + std::to_string(cycle), rank, rings);
      use(*group);
      body(rank, cycle, std::move(group));
    }
  });
}

TEST_EACH(closed_groups_make_room, bool rings, false, true) {
  const auto& heap = Heap::process();
  size_t early = 0, open_early = 0;
  std::barrier<> both(2);
  cycles(rings ? "rings-" : "closed-", kCycles, rings, [&](int rank, int cycle, std::unique_ptr<Communicator> group) {
    group.reset();
    both.arrive_and_wait();
    if (rank == 0 && cycle == 10) {
      early = heap->allocated_bytes();
      open_early = descriptors();
    }
    if (rank == 0 && cycle > 10) {
      CHECK(heap->allocated_bytes() <= early + 2 * RegionLayout(2, rings ? Rings::all : Rings::messages).bytes());
      CHECK(descriptors() <= open_early + 16);
    }
    both.arrive_and_wait();
  });
}

/// What a rank that has closed left behind is there while the other may look at it, and goes with that one's end.
TEST(a_rank_that_stays_keeps_what_it_reads) {
  const auto& heap = Heap::process();
  const size_t region = RegionLayout(2, Rings::messages).bytes();
  std::unique_ptr<Communicator> groups[2];
  cycles("stays-", 1, false,
         [&](int rank, int, std::unique_ptr<Communicator> group) { groups[rank] = std::move(group); });
  const size_t both = heap->allocated_bytes();
  groups[0].reset();
  cycles("beside-", 10, false, [](int, int, std::unique_ptr<Communicator> group) { group.reset(); });
  CHECK(heap->allocated_bytes() >= both);
  CHECK_HAS(CHECK_THROWS(PeerLost, use(*groups[1])), "rank 0 left the group");
  groups[1].reset();
  CHECK(heap->allocated_bytes() <= both - 2 * region);
}

cpu_set_t processors(std::initializer_list<int> numbers) {
  cpu_set_t set;
  CPU_ZERO(&set);
  for (const int number : numbers) CPU_SET(number, &set);
  return set;
}

TEST(who_has_a_processor_of_its_own) {
  CHECK(one_processor_each({processors({5}), processors({3})}));
  CHECK(!one_processor_each({processors({5}), processors({5})}));
  CHECK(one_processor_each({processors({0, 1}), processors({0})}));
  CHECK(one_processor_each({processors({0, 1}), processors({1, 2}), processors({0, 1}), processors({2, 3})}));
  CHECK(!one_processor_each({processors({0}), processors({0}), processors({1, 2, 3})}));  // though there are enough
  CHECK(!one_processor_each({processors({0, 1}), processors({0, 1}), processors({0, 1})}));
}

/// Where staging buffers are depends on whether ranks share processors. Rank 0 may use all, rank 1 only one.
TEST_EACH(ranks_that_may_use_different_processors, bool threads, false, true) {
  const cpu_set_t all = usable_processors();
  int first = 0;
  while (!CPU_ISSET(first, &all)) ++first;
  ThreadStore store;
  both_ranks([&](int rank) {
    const cpu_set_t one = processors({first});
    if (rank == 1) CHECK_EQ(::sched_setaffinity(0, sizeof one, &one), 0);
    const Deadline soon = Deadline::after(kSoon);
    auto transport =
        threads ? join_threads("pinned", rank, 2, soon) : connect_shared_memory(store, "pinned", rank, 2, soon);
    CHECK_EQ(transport->oversubscribed(), CPU_COUNT(&all) == 1);
    Communicator group(std::make_unique<PullEngine>(std::move(transport)), kSoon);
    for (const size_t count : {1'000, 16'384, 100, 40'000, 300'000, 7}) {
      for (int times = 0; times < 20; ++times) {
        Floats data(count, static_cast<float>(rank + times));
        group.run(data.sum());
        CHECK(data.values == std::vector<float>(count, static_cast<float>(2 * times + 1)));
      }
    }
  });
}

/// A group that was closed holds nothing, although somebody still holds it; and does nothing to what is there now.
TEST(closed_groups_that_are_kept) {
  std::vector<std::unique_ptr<Communicator>> kept[2];
  cycles("kept-", 30, false, [&](int rank, int, std::unique_ptr<Communicator> group) {
    group->close(kSoon);
    kept[rank].push_back(std::move(group));
  });
  const auto& heap = Heap::process();
  std::byte* mine = heap->allocate(heap->bytes() / 2);
  std::memset(mine, 7, heap->bytes() / 2);
  for (auto& groups : kept) {
    for (auto& group : groups) {
      group->abort("late");
      group->health().poison(Timeout("late"));
      CHECK_THROWS(Error, group->health().poll_failures());
      CHECK_THROWS(Error, use(*group));
    }
  }
  for (size_t i = 0; i < heap->bytes() / 2; ++i) {
    if (mine[i] != std::byte{7}) {
      CHECK_EQ(i, heap->bytes());
      break;
    }
  }
  heap->free(mine);
}

}  // namespace
