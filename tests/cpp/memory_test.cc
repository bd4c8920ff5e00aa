// The registered heap: allocation, reuse, read-only peers, forked children.
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <cstring>
#include <random>

#include "base/environment.h"
#include "base/error.h"
#include "check.h"
#include "memory/heap.h"

using namespace ringlet;

namespace {

constexpr size_t kHeapBytes = size_t{64} << 20;

TEST(blocks_do_not_overlap) {
  Heap heap(kHeapBytes);
  std::mt19937 random(7);
  std::vector<std::pair<std::byte*, size_t>> blocks;
  for (int i = 0; i < 2000; ++i) {
    if (blocks.size() > 40 || (!blocks.empty() && random() % 3 == 0)) {
      const size_t k = random() % blocks.size();
      const auto [block, bytes] = blocks[k];
      CHECK_EQ(static_cast<int>(block[0]), static_cast<int>(block[bytes - 1]));
      heap.free(block);
      blocks.erase(blocks.begin() + static_cast<long>(k));
    } else {
      const size_t bytes = 1 + random() % (random() % 10 == 0 ? 3'000'000 : 5'000);
      std::byte* block = heap.allocate(bytes);
      CHECK_EQ(reinterpret_cast<uintptr_t>(block) % 64, uintptr_t{0});
      std::memset(block, static_cast<int>(i % 251), bytes);
      blocks.emplace_back(block, bytes);
    }
  }
  for (const auto& [block, bytes] : blocks) heap.free(block);
  CHECK_EQ(heap.allocated_bytes(), size_t{0});
  std::byte* all = heap.allocate(kHeapBytes);  // everything has grown together again
  CHECK(heap.locate(all, kHeapBytes).has_value());
  CHECK_HAS(CHECK_THROWS(ResourceError, heap.allocate(1)), "RINGLET_HEAP_MIB");
  heap.free(all);
}

TEST(freed_memory_goes_back) {
  Heap heap(kHeapBytes);
  std::byte* block = heap.allocate(size_t{40} << 20);
  block[0] = std::byte{1};
  heap.free(block);
  CHECK_EQ(static_cast<int>(heap.allocate(size_t{40} << 20)[0]), 0);
}

TEST(blocks_in_use_are_freed_later) {
  Heap heap(kHeapBytes);
  bool used = true;
  std::byte* block = heap.allocate(kHeapBytes / 2);
  heap.free_when({{block, [&] { return !used; }}});
  CHECK_THROWS(ResourceError, heap.allocate(kHeapBytes));
  CHECK_EQ(heap.allocated_bytes(), kHeapBytes / 2);
  used = false;
  CHECK_EQ(heap.allocate(kHeapBytes), block);  // one that is full asks again
}

TEST(counters_never_repeat) {
  Heap heap(kHeapBytes);
  std::vector<std::pair<std::atomic<uint64_t>*, uint64_t>> dropped;
  for (int i = 0; i < 2000; ++i) {
    std::atomic<uint64_t>& counter = heap.take_counter();
    dropped.emplace_back(&counter, counter.load());
    if (i % 2 == 0) heap.take_counter();  // stays in use
    heap.drop_counter(counter);
    heap.free(heap.allocate(100));
  }
  for (const auto& [counter, value] : dropped) CHECK(counter->load() > value);
  CHECK(heap.allocated_bytes() < size_t{32} << 10);
}

TEST(peers_cannot_write) {
  Heap heap(kHeapBytes);
  heap.allocate(64)[0] = std::byte{42};
  const Descriptor theirs = heap.read_only_descriptor();
  const Mapping seen(theirs.get(), kHeapBytes, Mapping::Access::read_only);
  CHECK_EQ(static_cast<int>(seen.base()[0]), 42);
  CHECK_THROWS(ResourceError, Mapping(theirs.get(), kHeapBytes, Mapping::Access::read_write));
}

TEST(a_forked_child_has_its_own) {
  const auto parents = Heap::process();
  std::byte* block = parents->allocate(64);
  block[0] = std::byte{7};
  std::byte* late = parents->allocate(size_t{1} << 13);  // of another page
  int told[2];
  CHECK_EQ(::pipe(told), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    parents->free(block);  // none of these must reach the parent's heap
    parents->discard(block, 64);
    const bool own = Heap::process() != parents && static_cast<int>(block[0]) == 7;
    block[0] = std::byte{8};
    const pid_t grandchild = ::fork();
    if (grandchild == 0) {
      const bool inherits = static_cast<int>(block[0]) == 8;
      block[0] = std::byte{9};
      ::_exit(inherits ? 0 : 1);
    }
    int status = -1;
    ::waitpid(grandchild, &status, 0);
    char word = 0;
    const bool seen = ::read(told[0], &word, 1) == 1 && static_cast<int>(late[1 << 12]) == 5;
    ::_exit(own && status == 0 && seen && static_cast<int>(block[0]) == 8 ? 0 : 1);
  }
  late[1 << 12] = std::byte{5};  // the child has not written there
  CHECK_EQ(::write(told[1], "", 1), 1);
  int status = -1;
  ::waitpid(child, &status, 0);
  CHECK_EQ(status, 0);
  CHECK_EQ(static_cast<int>(block[0]), 7);
  CHECK(parents->allocate(64) != block);
}

TEST(sizes_from_the_environment) {
  const auto read = [](const char* text) {
    ::setenv("RINGLET_TEST_MIB", text, 1);
    return bytes_from_environment("RINGLET_TEST_MIB", size_t{1} << 20, 16, 5);
  };
  CHECK_EQ(read("16"), size_t{16} << 20);
  CHECK_EQ(read(""), size_t{5});
  for (const char* wrong : {"15", "-16", "16 ", " 16", "0x20", "many", "1e3", "17592186044416"}) {
    const std::string message = CHECK_THROWS(InvalidUsage, read(wrong));
    CHECK_EQ(message, std::string("RINGLET_TEST_MIB=\"") + wrong + "\" is not a number of MiB from 16 up");
  }
  ::unsetenv("RINGLET_TEST_MIB");
  CHECK_EQ(bytes_from_environment("RINGLET_TEST_MIB", 1, 0, 7), size_t{7});
}

}  // namespace
