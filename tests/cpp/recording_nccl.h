// A NCCL and a GPU that exist on the host: what is put on streams runs when execute() is called, in any order that
// streams, events and messages allow, drawn from a seed. So a wait that is missing shows as a wrong result for some
// seed, and one that is too much as a standstill. What breaks NCCL's rules is a violation: a send outside a group, an
// empty or overlapping message, sizes that do not match, a communicator used after its end.
// One thread plays all ranks: it says in `rank` for whom it acts. Ownership: one at a time, and it owns what the tables
// hand out. Thread safety: none.
#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "cuda/device_library.h"
#include "gpu/nccl_api.h"

struct FakeStream;
struct FakeGroup;
struct FakeCommunicator;

class FakeMachine {
 public:
  FakeMachine();
  ~FakeMachine();
  FakeMachine(const FakeMachine&) = delete;
  FakeMachine& operator=(const FakeMachine&) = delete;

  static const ringlet::NcclApi& nccl();
  static const RingletCudaDevice& device();

  /// Runs all that was enqueued; false where something can never run.
  bool execute(unsigned seed);

  int rank = 0;                         ///< for whom the next calls are
  std::vector<std::string> violations;  ///< of NCCL's rules
  std::vector<std::string> messages;    ///< "0>1 512", in the order of their sends' groups
  int overlaps = 0;                     ///< reductions and copies that ran while a group of the same rank was under way
  int one_by_one = 0;                   ///< reductions of 64 elements or more that no pack of 16 bytes would serve
  size_t allocated = 0;                 ///< bytes on the device now
  std::atomic<bool> connects = true;    ///< false: what takes all ranks waits until the communicator is aborted
  int state = 0;                        ///< what communicators report
  int device_refuses = 0;               ///< what the next reductions return

  // What the tables' functions act on.
  struct Part {
    bool sends;
    int peer;
    std::byte* address;
    size_t bytes;
    std::shared_ptr<FakeGroup> group;  // once it has begun
  };
  FakeStream* add_stream();
  void violate(const std::string& what);
  void add_part(FakeCommunicator* communicator, Part part, FakeStream* stream);
  int close_group();
  /// What NCCL does where it waits for the other ranks.
  int connect(const FakeCommunicator& communicator) const;
  int open_groups = 0;
  std::map<void*, std::pair<std::unique_ptr<std::byte[]>, size_t>> memory;
  std::vector<std::unique_ptr<FakeCommunicator>> communicators;

 private:
  bool step(std::mt19937& random);
  void run_head(FakeStream& stream);
  bool can_run(const FakeStream& stream) const;
  void post(const std::shared_ptr<FakeGroup>& group);
  void move(int from, int to);

  std::vector<std::unique_ptr<FakeStream>> streams_;
  std::map<FakeStream*, std::shared_ptr<FakeGroup>> open_;  // of the group being put together
  const FakeCommunicator* open_communicator_ = nullptr;
  std::map<std::pair<int, int>, std::pair<std::deque<Part>, std::deque<Part>>> p2p_;  // sends and receives, in order
};

struct FakeStream {
  struct Item {
    std::function<void()> act{};    // a kernel or a copy
    std::shared_ptr<bool> sets{};   // an event's record
    std::shared_ptr<bool> waits{};  // for an event
    std::shared_ptr<FakeGroup> group{};
  };
  int rank;
  std::deque<Item> items;
};

struct FakeGroup {
  int rank;
  bool posted = false;
  size_t left = 0;
  std::vector<FakeMachine::Part> parts;
};

struct FakeEvent {
  std::shared_ptr<bool> last;
};

struct FakeCommunicator {
  FakeCommunicator(int rank, int world) : rank(rank), world(world) {}
  int rank;
  int world;
  std::atomic<bool> ended = false;
  mutable std::atomic<bool> inside = false;  // a call that waits for the other ranks
};
