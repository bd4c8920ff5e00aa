// How calls of a group's GPU part end that are never done, ranks as threads on a GPU and a NCCL of the host that run
// (emulated_gpu.cc): deadlines, aborts, peers that fail, and a NCCL that takes for ever over its own end.
#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "check.h"
#include "emulated_gpu.h"
#include "gpu/gpu_group.h"
#include "gpu_ranks.h"

using namespace gpu_ranks;

namespace {

GpuExecutors::Parts parts_of(bool nccl) { return nccl ? parts(kNever) : without_nccl(); }

/// A rank that does not come: Timeout at the deadline for this call and those behind it, and for the host's group.
TEST_EACH(timeouts, bool nccl, true, false) {
  const GpuExecutors::Parts mine = parts_of(nccl);
  run_well(2, Between::one_memory, [&](Communicator& host) {
    RankFloats floats(host.rank());
    const StreamOwner own;
    GpuGroup group(host, mine);
    if (host.rank() == 1) return;
    floats.call.timeout = std::chrono::milliseconds(50);
    const auto first = group.run(floats.call, own.stream), second = group.run(floats.call, own.stream);
    const std::string message = CHECK_THROWS(Timeout, first->wait(kLong));
    CHECK_HAS(message, "rank 0 of 2", "all_reduce #");
    // Whichever came first: the kernel's own look at the clock says for whom it waited.
    CHECK(message.find("was not done at the deadline") != std::string::npos ||
          (mine.nccl == nullptr && message.find("waited too long for rank 1") != std::string::npos));
    CHECK_THROWS(Timeout, second->wait(kLong));
    CHECK_THROWS(Timeout, group.run(floats.call, own.stream));
    CHECK(host.health().failure() == ErrorKind::timeout);
  });
}

std::mutex communicators_mutex;
std::vector<NcclComm> communicators;

/// A NCCL whose communicators can be ended from outside, as the end of a process does.
const NcclApi& remembering() {
  static const NcclApi api = [] {
    NcclApi made = *parts().nccl;
    made.comm_init_rank_config = [](NcclComm* comm, int world, NcclUniqueId id, int rank, NcclConfig* config) {
      const int result = parts().nccl->comm_init_rank_config(comm, world, id, rank, config);
      const std::lock_guard lock(communicators_mutex);
      communicators.push_back(*comm);
      return result;
    };
    return made;
  }();
  return api;
}

struct EndOfNccl {
  bool wanted;
  ~EndOfNccl() {
    if (!wanted) return;
    const std::lock_guard lock(communicators_mutex);
    for (NcclComm comm : communicators) parts().nccl->comm_abort(comm);
  }
};

/// A peer that stopped: launches fill the queue, and then the host waits in one. It hears of the deadline all the same,
/// whether the launch is of a later call or of the first.
TEST_EACH(full_launch_queue, bool nccl, true, false) {
  GpuExecutors::Parts mine = parts_of(nccl);
  if (mine.nccl != nullptr) mine.nccl = &remembering();
  for (const int length : {4, 64}) {
    emulated_gpu_launch_queue(length);
    run_well(2, Between::one_memory, [&](Communicator& host) {
      RankFloats floats(host.rank(), 300000);
      const StreamOwner own;
      const EndOfNccl end_of_nccl{host.rank() ==
                                  0};  // a launch that waits keeps the communicator, and its kernels the stream
      GpuGroup group(host, mine);
      if (host.rank() == 1) return;
      floats.call.timeout = std::chrono::milliseconds(300);
      std::vector<std::shared_ptr<Work>> given;
      const auto start = std::chrono::steady_clock::now();
      const std::string message =
          CHECK_THROWS(Timeout, for (int i = 0; i < 100; ++i) { given.push_back(group.run(floats.call, own.stream)); });
      CHECK(std::chrono::steady_clock::now() - start < kSoon);
      CHECK_HAS(message, "all_reduce #0 ");
      for (const auto& work : given) CHECK_THROWS(Timeout, work->wait(kLong));
    });
  }
  emulated_gpu_launch_queue(1024);
}

/// Closed or aborted with a call pending: it ends with an error, and nothing waits for ever.
TEST_EACH(endings, bool nccl, true, false) {
  const GpuExecutors::Parts mine = parts_of(nccl);
  run_well(2, Between::one_memory, [&](Communicator& host) {
    RankFloats floats(host.rank());
    const StreamOwner own;
    std::shared_ptr<Work> work;
    {
      GpuGroup group(host, mine);
      if (host.rank() == 0) work = group.run(floats.call, own.stream);
    }
    if (host.rank() == 0) {
      CHECK_HAS(CHECK_THROWS(InvalidUsage, work->wait(kLong)), "closed before");
    }
  });
  run_well(2, Between::one_memory, [&](Communicator& host) {
    RankFloats floats(host.rank());
    const StreamOwner own;
    GpuGroup group(host, mine);
    if (host.rank() == 1) return;
    const auto work = group.run(floats.call, own.stream);
    group.abort("enough");
    CHECK_HAS(CHECK_THROWS(PeerLost, work->wait(kLong)), "enough");
    CHECK_THROWS(PeerLost, group.run(floats.call, own.stream));
  });
}

/// end() and abort() while other threads make calls: those that come too late are refused.
TEST_EACH(ended_beside_calls, bool nccl, true, false) {
  const GpuExecutors::Parts mine = parts_of(nccl);
  // A turn waits for the call that is inside NCCL.
  for (int turn = 0; turn < (few_cases() ? 4 : 10); ++turn) {
    run_well(2, Between::one_memory, [&](Communicator& host) {
      const auto group = std::make_shared<GpuGroup>(host, mine);
      std::vector<std::thread> threads;
      for (int i = 0; i < 2; ++i) {
        threads.emplace_back([group, i, rank = host.rank()] {
          RankFloats floats(rank, 10);
          const StreamOwner own;
          try {
            for (;;) {
              group->follow_calls(own.stream);
              group->run(floats.call, own.stream)->wait(kLong);
              if (i == 1) group->abort("enough");
            }
          } catch (const Error&) {
          }
        });
      }
      group->end();
      for (std::thread& thread : threads) thread.join();
      RankFloats late(host.rank(), 10);
      const StreamOwner own;
      CHECK_THROWS(Error, group->run(late.call, own.stream));
    });
  }
}

/// A rank that waits for another hears at once why that will not come, and not at its own deadline.
TEST_EACH(peers_that_fail, bool nccl, true, false) {
  const GpuExecutors::Parts mine = parts_of(nccl);
  run_well(2, Between::one_memory, [&](Communicator& host) {
    RankFloats floats(host.rank());
    const StreamOwner own;
    GpuGroup group(host, mine);
    if (host.rank() == 1) {
      host.health().poison(DeviceError("out of luck"));
      return;
    }
    const std::string message = CHECK_THROWS(DeviceError, group.run(floats.call, own.stream)->wait(kSoon));
    CHECK(message.find("all_reduce #0") == 0 && message.find("rank 1 reported: out of luck") != std::string::npos);
  });
}

std::atomic<bool> nccl_may_end{false}, told_before{false};
std::atomic<Communicator*> host_of_rank_0{nullptr};
std::atomic<int> inside{0};  // threads that NCCL keeps, and that nobody waits for

/// Counts a thread in NCCL until it may go.
struct Kept {
  Kept() { ++inside; }
  ~Kept() {
    while (!nccl_may_end) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    --inside;
  }
};

/// NCCL's, while a CUDA graph holds one of its calls.
GpuExecutors::Parts that_do_not_end(NcclApi& api) {
  api = *parts().nccl;
  api.comm_abort = [](NcclComm comm) {
    const Kept kept;
    // The first abort is rank 0's. Rank 1's comes when its NCCL does not end either, and then rank 0 may be gone.
    if (Communicator* host = host_of_rank_0.exchange(nullptr)) told_before = host->health().failure().has_value();
    return parts().nccl->comm_abort(comm);
  };
  api.comm_finalize = [](NcclComm) {
    const Kept kept;
    return kNcclSuccess;
  };
  GpuExecutors::Parts mine = parts(kNever);
  mine.nccl = &api;
  return mine;
}

/// Calls, groups and peers end all the same, and the peers hear of it first.
TEST(a_nccl_that_does_not_end) {
  nccl_may_end = false;
  NcclApi api;
  const GpuExecutors::Parts mine = that_do_not_end(api);
  const auto start = std::chrono::steady_clock::now();
  run_well(2, Between::one_memory, [&](Communicator& host) {
    RankFloats floats(host.rank());
    const StreamOwner own;
    GpuGroup group(host, mine);
    if (host.rank() == 0) {
      host_of_rank_0 = &host;
      floats.call.timeout = std::chrono::milliseconds(50);
      CHECK_THROWS(Timeout, group.run(floats.call, own.stream)->wait(kSoon));
      return;
    }
    const Deadline deadline = Deadline::after(kSoon);
    CHECK_THROWS(Timeout, while (!deadline.passed()) host.health().poll_failures(););
  });
  CHECK(told_before);  // the peers, whatever NCCL waits for
  CHECK(std::chrono::steady_clock::now() - start < kSoon);
  nccl_may_end = true;
  const Deadline gone = Deadline::after(kSoon);
  while (inside > 0 && !gone.passed()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  CHECK(inside == 0);
}

}  // namespace
