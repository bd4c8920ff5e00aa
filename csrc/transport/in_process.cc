#include "transport/in_process.h"

#include <sys/mman.h>

#include <algorithm>
#include <condition_variable>
#include <map>
#include <mutex>
#include <vector>

#include "base/error.h"
#include "base/interrupts.h"
#include "base/process.h"
#include "base/processor.h"
#include "transport/store.h"

namespace ringlet {
namespace {

struct Hub {
  Hub(int world, size_t region_bytes)
      : world(world), region_bytes(region_bytes), joined(world, false), processors(world) {
    for (int rank = 0; rank < world; ++rank) wakeups.push_back(make_wakeup());
    bytes = region_bytes * static_cast<size_t>(world);
    void* memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) throw_errno("cannot map the regions of a threads group");
    regions = static_cast<std::byte*>(memory);
  }
  ~Hub() { ::munmap(regions, bytes); }

  int world;
  size_t region_bytes;
  size_t bytes;
  std::byte* regions;
  std::vector<Descriptor> wakeups;  // by rank
  std::vector<bool> joined;
  std::vector<cpu_set_t> processors;  // that the ranks may use
  int count = 0;
};

struct Hubs {
  std::mutex mutex;
  std::condition_variable changed;
  std::map<std::string, std::weak_ptr<Hub>> by_name;  // guarded by mutex, like the hubs
};
constinit OfProcess<Hubs> hubs_of_process;

class Threads final : public Transport {
 public:
  Threads(std::shared_ptr<Hub> hub, int rank, TensorMemory tensors)
      : Transport(rank, hub->world), hub_(std::move(hub)), tensors_(tensors) {
    for (int q = 0; q < world_; ++q) links_[q].region = hub_->regions + static_cast<size_t>(q) * hub_->region_bytes;
    count_processors(hub_->processors);
  }

  const char* name() const noexcept override { return "threads"; }
  std::optional<uint64_t> locate(const void* pointer, size_t) const noexcept override {
    if (tensors_ == TensorMemory::ordinary) return std::nullopt;
    return reinterpret_cast<uintptr_t>(pointer);  // links_[q].base is null, so a registered address is the pointer
  }
  bool unmaps_tensors() const noexcept override { return tensors_ == TensorMemory::shared; }
  int wakeup(int rank, ConnectionKind kind) const noexcept override {
    return layout_.has_ring(kind) ? hub_->wakeups[rank].get() : -1;
  }
  bool alive(int) const noexcept override { return true; }  // a thread cannot end without its communicator
  void depart() noexcept override {
    Transport::depart();
    hub_.reset();
  }

 private:
  std::shared_ptr<Hub> hub_;
  TensorMemory tensors_;
};

/// Takes back this rank's attempt to join, so that it may try again.
void leave_hub(Hubs& hubs, const std::string& name, Hub& hub, int rank) {
  hub.joined[rank] = false;
  if (--hub.count == 0) hubs.by_name.erase(name);
}

}  // namespace

std::unique_ptr<Transport> join_threads(const std::string& name, int rank, int world, const Deadline& deadline,
                                        TensorMemory tensors) {
  Hubs& hubs = hubs_of_process.get();
  std::unique_lock lock(hubs.mutex);
  std::shared_ptr<Hub> hub = hubs.by_name[name].lock();
  if (!hub) {
    hub = std::make_shared<Hub>(world, (RegionLayout(world, Rings::messages).bytes() + 4095) / 4096 * 4096);
    hubs.by_name[name] = hub;
  }
  if (hub->world != world || hub->joined[rank]) {
    throw InvalidUsage("rank " + std::to_string(rank) + " of " + std::to_string(world) +
                       " cannot join the threads group \"" + name + "\", which has world " +
                       std::to_string(hub->world) + (hub->world == world ? " and that rank already" : ""));
  }
  hub->joined[rank] = true;
  hub->processors[rank] = usable_processors();
  ++hub->count;
  if (hub->count == world)
    hubs.by_name.erase(name);  // the name is free for the next group; the transports keep this hub
  hubs.changed.notify_all();
  while (hub->count < world) {
    if (deadline.passed()) {
      const std::string missing = ranks_where(world, [&](int q) { return !hub->joined[q]; });
      leave_hub(hubs, name, *hub, rank);
      throw Timeout("rank " + std::to_string(rank) + ": thread(s) of rank " + missing + " did not join the group \"" +
                    name + "\" in time: they may have failed, or not have started");
    }
    hubs.changed.wait_for(lock, std::min(deadline.left(), kInterruptCheckEvery));
    lock.unlock();
    const std::exception_ptr interrupted = caught_interrupt();
    lock.lock();
    if (!interrupted) continue;
    if (hub->count < world) leave_hub(hubs, name, *hub, rank);
    std::rethrow_exception(interrupted);
  }
  lock.unlock();
  return std::make_unique<Threads>(std::move(hub), rank, tensors);
}

}  // namespace ringlet
