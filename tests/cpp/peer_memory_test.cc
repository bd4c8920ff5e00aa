// Memory that peers' GPUs reach, on a GPU of the host (emulated_gpu.cc): regions that serve again, registered heaps,
// and what is opened of other processes.
#include "gpu/peer_memory.h"

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "emulated_gpu.h"
#include "gpu/gpu_heap.h"
#include "gpu_ranks.h"

using namespace gpu_ranks;

namespace {

/// Regions of groups that ended well serve the next ones.
void try_regions() {
  const auto allocated_by = [](int groups, bool well) {
    const int before = emulated_gpu_allocations();
    for (int i = 0; i < groups; ++i) {
      run_well(2, Between::one_memory, [&](Communicator& host) {
        RankFloats floats(host.rank());
        GpuGroup group(host, without_nccl());
        group.run(floats.call, nullptr)->wait(kLong);
        CHECK_EQ(floats.values[0], 3.0f);
        host.run(Call{});
        if (!well) group.abort("enough");
        if (!well) CHECK_THROWS(PeerLost, group.run(floats.call, nullptr)->wait(kLong));
      });
    }
    return emulated_gpu_allocations() - before;
  };
  CHECK_EQ(allocated_by(3, true), 2 + 3 * 2);  // two regions, and room for each engine's plans
  CHECK_EQ(allocated_by(1, false), 2);
  CHECK_EQ(allocated_by(2, true), 2 + 2 * 2);  // after an error a kernel may still be about to run
}

/// Tensors in a GPU's heap are read in place where all ranks' are; the heap is as large as was said.
void try_heaps() {
  CHECK(GpuHeap::of(device(), 5) == nullptr);
  setenv("RINGLET_GPU_HEAP_MIB", "much", 1);
  CHECK_THROWS(InvalidUsage, GpuHeap::of(device(), 5));
  setenv("RINGLET_GPU_HEAP_MIB", "1", 1);
  GpuHeap* heap = GpuHeap::of(device(), 0);
  unsetenv("RINGLET_GPU_HEAP_MIB");
  CHECK(heap != nullptr && heap == GpuHeap::of(device(), 0) && heap->bytes() == size_t{1} << 20);
  CHECK(heap->holds(heap->base(), heap->bytes()) && !heap->holds(heap->base() + 1, heap->bytes()));
  CHECK_HAS(CHECK_THROWS(ResourceError, heap->allocate((size_t{1} << 20) + 1)), "RINGLET_GPU_HEAP_MIB");
  const int before = emulated_gpu_in_place();
  run_well(3, Between::one_memory, [&](Communicator& host) {
    GpuGroup group(host, parts());
    std::byte* memory = heap->allocate(4000);
    CHECK(reinterpret_cast<uintptr_t>(memory) % 256 == 0);
    for (const bool all : {true, false}) {
      RankFloats floats(host.rank());
      Call call = floats.call;
      call.algorithm = find_algorithm(Collective::all_reduce, "two_shot");  // one_shot would push so little
      if (all || host.rank() == 1) {
        std::memcpy(memory, floats.values.data(), 4000);
        call.input = call.output = memory;
      }
      group.run(call, nullptr)->wait(kLong);
      CHECK_EQ(reinterpret_cast<const float*>(call.output)[999], 6.0f);
      host.run(Call{});
    }
    heap->free(memory);
  });
  CHECK_EQ(emulated_gpu_in_place() - before, 3 + 1);
}

/// As between processes: memory is opened where it was shared, and closed at the end; with a heap, that too.
void other_processes(int each) {
  PeerMemory mine(device()), other(device());
  std::vector<PeerMemory::Offer> offers = {mine.offer(), other.offer()};
  offers[1].process[0] ^= 1;
  offers[1].address = nullptr;
  {
    PeerMemory third(device());
    offers[0] = third.offer();
    third.open(offers, 0);
    const size_t before = PeerMemory::kGoodbyes;
    CHECK(third.regions() == (std::vector<std::byte*>{offers[0].address + before, other.offer().address + before}));
    CHECK_EQ(emulated_gpu_opened(), each);
    CHECK(third.heaps() == (std::vector<std::byte*>{offers[0].heap, offers[1].heap}) &&
          (each == 2) == (offers[1].heap != nullptr));
    constexpr auto kPatience = std::chrono::milliseconds(50);
    const auto start = std::chrono::steady_clock::now();
    third.leave(kPatience);  // the other is of another process, and has not left: its kernels may look here
    CHECK(std::chrono::steady_clock::now() - start >= kPatience);
  }
  CHECK_EQ(emulated_gpu_opened(), 0);
  PeerMemory before_all_left(device());
  CHECK(before_all_left.offer().address != offers[0].address);  // where the other may still look, or write
  other.open(offers, 1);
  other.leave(std::chrono::seconds(0));
  PeerMemory again(device());
  CHECK(again.offer().address == offers[0].address);
  CHECK_EQ(PeerMemory::processors({offers[0], offers[1]}), 4);
  offers[1].device.uuid[0] = 1;
  CHECK_EQ(PeerMemory::processors({offers[0], offers[1]}), 8);
  for (PeerMemory* memory : {&mine, &before_all_left, &again}) memory->give_up();
}

TEST(regions) {
  try_regions();
  other_processes(1);
}

TEST(heaps) {  // after the regions: what a process has shared stays
  try_heaps();
  other_processes(2);
}

}  // namespace
