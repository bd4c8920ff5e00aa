// A group's GPU part, ranks as threads on a GPU and a NCCL of the host that run (emulated_gpu.cc): that ranks find
// together what they have, and that calls follow streams.
#include "gpu/gpu_group.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/log.h"
#include "check.h"
#include "collective_cases.h"
#include "emulated_gpu.h"
#include "gpu_ranks.h"
#include "log_place.h"
#include "uneven_blocks.h"

using namespace gpu_ranks;
using namespace collective_cases;

namespace {

/// All algorithms, several calls under way at once on two streams; through NCCL, through peers' memory, and through
/// both.
TEST_EACH(contract, size_t peer_bytes, GpuExecutors::kPeerBytes, kAlways, kNever) {
  for (const int world : {1, 3, 5}) {
    if (kSanitized && world != 3) continue;
    run_well(world, Between::one_memory, [&](Communicator& host) {
      std::vector<std::unique_ptr<Tensors>> all;
      const StreamOwner one, two;
      GpuGroup group(host, parts(peer_bytes));
      std::vector<std::shared_ptr<Work>> works;
      std::vector<Case> cases;
      for (const Algorithm& algorithm : algorithms()) {
        for (const size_t count : {size_t{1}, size_t{1237}, size_t{300007}}) {
          if (count > 10000 && (cases.size() % 4 != 0 || peer_bytes == kAlways)) continue;
          cases.push_back({&algorithm, world, algorithm.collective == Collective::barrier ? 0 : count});
        }
      }
      for (size_t i = 0; i < cases.size(); ++i) {
        all.push_back(std::make_unique<Tensors>(cases[i], host.rank()));
        all[i]->write_input();
        works.push_back(group.run(all[i]->call, i % 3 == 0 ? one.stream : two.stream));
      }
      for (size_t i = 0; i < cases.size(); ++i) {
        works[i]->wait(kLong);
        all[i]->read_output();
        check_report(all[i]->good(expected(cases[i], host.rank())), __FILE__, __LINE__, describe_case(cases[i]));
      }
    });
  }
}

/// NCCL's own collectives, by name and as what `auto` means beyond peers' memory; what NCCL lacks goes by schedules.
TEST(nccls_own_collectives) {
  for (const int world : {1, 3}) {
    run_well(world, Between::one_memory, [&](Communicator& host) {
      GpuGroup group(host, parts(kNever));
      const StreamOwner own;
      const auto run = [&](Case c, bool by_name) {
        Tensors tensors(c, host.rank());
        tensors.write_input();
        if (!by_name) tensors.call.algorithm = nullptr;
        group.run(tensors.call, own.stream)->wait(kLong);
        tensors.read_output();
        check_report(tensors.good(expected(c, host.rank())), __FILE__, __LINE__, describe_case(c));
      };
      const int before = emulated_gpu_natives();
      host.run(Call{});
      for (const Collective which : {Collective::all_reduce, Collective::reduce_scatter, Collective::reduce,
                                     Collective::all_gather, Collective::broadcast}) {
        for (const DType dtype : {DType::float32, DType::bfloat16, DType::int64}) {
          for (const bool by_name : {true, false}) {
            Case c{nccls_own(which), world, 1237, dtype};
            c.in_place = by_name;
            run(c, by_name);
          }
        }
      }
      host.run(Call{});
      CHECK_EQ(emulated_gpu_natives() - before, 5 * 3 * 2 * world);
      Case c{nccls_own(Collective::all_reduce), world, 1237, DType::float32, ReduceOp::min};
      run(c, /*by_name=*/false);
      c.op = ReduceOp::premul_sum;
      run(c, /*by_name=*/false);
      host.run(Call{});
      CHECK_EQ(emulated_gpu_natives() - before, 5 * 3 * 2 * world);
      const std::string message = CHECK_THROWS(InvalidUsage, run(c, /*by_name=*/true));
      CHECK(message.find("all_reduce #32 (nccl, premul_sum, float32, 1237 elements)") == 0);
      host.run(Call{});
    });
  }
  run_well(2, Between::one_memory, [&](Communicator& host) {
    GpuGroup group(host, without_nccl());
    RankFloats floats(host.rank());
    floats.call.algorithm = nccls_own(Collective::all_reduce);
    const std::string message = CHECK_THROWS(InvalidUsage, group.run(floats.call, nullptr));
    CHECK(message.find("the algorithm nccl needs NCCL, and there is none; rank 0: no NCCL: gone fishing") !=
          std::string::npos);
  });
}

/// An all-to-all of blocks that differ in length goes through peers' memory, with and without NCCL, however long; without
/// peers' memory through NCCL. A length that does not fit is named on all ranks.
TEST(uneven_all_to_all) {
  constexpr int kWorld = 3;
  const auto call_of = [](uneven_blocks::UnevenRank& rank) {
    Call call;
    call.collective = Collective::all_to_all;
    call.dtype = DType::int32;
    call.count = rank.blocks.longest;
    call.blocks = &rank.blocks;
    return call;
  };
  for (const size_t unit : {size_t{1}, size_t{100000}}) {
    for (const GpuExecutors::Parts& mine : {parts(), without_nccl(), parts(kNever)}) {
      const int messages = emulated_gpu_messages();
      run_well(kWorld, Between::one_memory, [&](Communicator& host) {
        GpuGroup group(host, mine);
        const StreamOwner own;
        uneven_blocks::UnevenRank rank({Collective::all_to_all, unit}, host.rank(), kWorld);
        for (int i = 0; i < 2; ++i) group.run(call_of(rank), own.stream)->wait(kLong);
        CHECK(rank.out == rank.wanted);
      });
      CHECK((emulated_gpu_messages() > messages) == (mine.peer_bytes == kNever));
    }
  }
  std::atomic<int> told{0};
  run_well(kWorld, Between::one_memory, [&](Communicator& host) {
    uneven_blocks::UnevenRank rank({Collective::all_to_all}, host.rank(), kWorld);
    const StreamOwner own;
    GpuGroup group(host, parts());
    if (host.rank() == 0) rank.blocks.counts[kWorld + 2] -= 1;
    const std::string message = CHECK_THROWS(InvalidUsage, group.run(call_of(rank), own.stream)->wait(kSoon));
    told += message.find("rank 2 sends rank 0 300 elements, and rank 0 expects 299") != std::string::npos;
  });
  CHECK_EQ(told.load(), kWorld);
}

/// A rank that lacks something is named on all, and the host's group goes on.
TEST(lacking) {
  std::atomic<int> told{0};
  run_well(3, Between::one_memory, [&](Communicator& host) {
    const auto refused = [&](const GpuExecutors::Parts& mine, const GpuExecutors::Parts& others, const char* words) {
      const std::string message = CHECK_THROWS(DeviceError, GpuGroup(host, host.rank() == 1 ? mine : others));
      told += message.find(words) != std::string::npos &&
              message.find("rank " + std::to_string(host.rank()) + " of 3") != std::string::npos;
    };
    refused({.no_device = "no GPU"}, parts(), "rank 1: no GPU");
    GpuExecutors::Parts neither = without_nccl();
    neither.peer_bytes = kNever;
    refused(neither, parts(kNever), "NCCL; rank 1: no NCCL: gone fishing. Peers' memory; rank 0: ");
    const std::string differ = CHECK_THROWS(InvalidUsage, GpuGroup(host, parts(host.rank() == 2 ? 7 : 8)));
    told += differ.find("is 8 on rank 0 and 7 on rank 2") != std::string::npos;
    RankFloats floats(host.rank());
    host.run(floats.call);
    CHECK_EQ(floats.values[999], 6.0f);
    GpuGroup group(host, parts());
    group.run(floats.call, nullptr)->wait(kLong);
    CHECK_EQ(floats.values[999], 18.0f);
  });
  CHECK_EQ(told.load(), 9);
}

/// Ranks on several hosts are refused at once, although not all of them call, in words that say what serves them. The
/// host's group goes on.
TEST(several_hosts) {
  std::atomic<int> told{0};
  run_well(4, Between::mixed, [&](Communicator& host) {
    if (host.rank() != 3) {
      const std::string message = CHECK_THROWS(InvalidUsage, GpuGroup(host, parts()));
      told +=
          message ==
          "rank " + std::to_string(host.rank()) +
              " of 4 in its first call on a GPU: the group is on 2 hosts (ranks 0, 2; ranks 1, 3), and on GPUs ringlet "
              "serves one host only: use the nccl backend between hosts "
              "(init_process_group(\"cpu:ringlet,cuda:nccl\"))";
    }
    RankFloats floats(host.rank());
    host.run(floats.call);
    CHECK_EQ(floats.values[999], 10.0f);
  });
  CHECK_EQ(told.load(), 3);
}

/// Told that ranks may share a GPU, NCCL does not serve threads that do. It is not asked to, and peers' memory serves
/// them; threads with a GPU each it serves.
TEST(threads_on_a_gpu) {
  ::setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1", 1);
  for (const bool apart : {false, true}) {
    run_well(2, Between::one_memory, [&](Communicator& host) {
      GpuExecutors::Parts mine = parts();
      mine.number = apart ? host.rank() : 0;
      device().use(mine.number);
      GpuGroup group(host, mine);
      const std::string refused =
          "peer memory; no NCCL; rank 1: it is a thread of the process of rank 0 and on the same GPU, where NCCL "
          "serves "
          "one rank a process, also if NCCL_MULTI_RANK_GPU_ENABLE is set: start each rank as a process";
      CHECK_EQ(group.describe(), apart ? "peer memory up to 1048576 bytes, NCCL 2.28.9 beyond" : refused);
      RankFloats floats(host.rank());
      group.run(floats.call, nullptr)->wait(kLong);
      CHECK_EQ(floats.values[999], 3.0f);
      if (apart) return;
      const GpuExecutors::Parts neither = parts(kNever);
      CHECK_HAS(CHECK_THROWS(DeviceError, GpuGroup(host, neither)), "start each rank as a process");
    });
  }
  ::unsetenv("NCCL_MULTI_RANK_GPU_ENABLE");
}

/// Ranks that all took the first of several GPUs hear of it, once.
TEST(one_gpu_of_several) {
  struct Seen {
    int devices, number;
    int warnings;
  };
  const LogPlace place;
  for (const Seen& seen : {Seen{1, 0, 0}, Seen{8, 0, 1}, Seen{8, 3, 0}}) {
    const std::string file = std::to_string(seen.devices) + "-" + std::to_string(seen.number);
    place.begin("warning", file);
    emulated_gpu_devices(seen.devices);
    run_well(3, Between::one_memory, [&](Communicator& host) {
      GpuExecutors::Parts mine = parts();
      mine.number = seen.number;
      device().use(mine.number);
      GpuGroup group(host, mine);
    });
    const std::string text = place.text(file);
    CHECK_EQ(std::count(text.begin(), text.end(), '\n'), seen.warnings);
    const bool told = text.find(
                          "all ranks share GPU 0, although rank 0 sees 8 GPUs: call "
                          "torch.cuda.set_device(local_rank) before the first CUDA tensor") != text.npos;
    CHECK_EQ(told, seen.warnings == 1);
  }
  emulated_gpu_devices(1);
}

/// A group's limit of processors holds for its pull kernels and for NCCL's; ranks that give another one are named.
TEST(few_processors) {
  for (const int limit : {0, 3}) {
    run_well(2, Between::one_memory, [&](Communicator& host) {
      GpuExecutors::Parts mine = parts();
      mine.max_ctas = limit;
      emulated_gpu_most_blocks();
      host.run(Call{});
      GpuGroup group(host, mine);
      CHECK_EQ(emulated_gpu_max_ctas(), limit == 0 ? INT_MIN : limit);
      RankFloats floats(host.rank(), 100000);
      group.run(floats.call, nullptr)->wait(kLong);
      CHECK_EQ(floats.values[99999], 3.0f);
      host.run(Call{});
      if (host.rank() == 0) CHECK_EQ(emulated_gpu_most_blocks(), limit == 0 ? 4 : limit);
    });
  }
  run_well(2, Between::one_memory, [&](Communicator& host) {
    GpuExecutors::Parts mine = parts();
    mine.max_ctas = 4 + host.rank();
    const std::string message = CHECK_THROWS(InvalidUsage, GpuGroup(host, mine));
    CHECK(message.find("max_ctas is 4 on rank 0 and 5 on rank 1: set the same value on all ranks") !=
          std::string::npos);
  });
}

/// Words with flags are for devices that store 8 bytes as one.
TEST(small_all_reduces) {
  for (const int architecture : {90, 61}) {
    emulated_gpu_architecture(architecture);
    const int before = emulated_gpu_low_latencies();
    run_well(3, Between::one_memory, [&](Communicator& host) {
      RankFloats floats(host.rank());
      const StreamOwner own;
      GpuGroup group(host, parts());
      for (const float wanted : {6.0f, 18.0f}) {
        group.run(floats.call, own.stream)->wait(kLong);
        CHECK(floats.values[0] == wanted && floats.values[999] == wanted);
      }
    });
    CHECK_EQ(emulated_gpu_low_latencies() - before, architecture == 90 ? 6 : 0);
  }
  emulated_gpu_architecture(90);
}

/// What one rank cannot use none does; what is left serves what it can, and says so.
TEST(either) {
  run_well(3, Between::one_memory, [&](Communicator& host) {
    RankFloats floats(host.rank(), 400000);
    const StreamOwner own;
    {
      GpuGroup peers(host, host.rank() == 1 ? without_nccl() : parts());
      CHECK_EQ(peers.describe(), "peer memory; no NCCL; rank 1: no NCCL: gone fishing");
      peers.run(floats.call, nullptr)->wait(kLong);  // longer than what both would give to peers' memory
      CHECK_EQ(floats.values[399999], 6.0f);
    }
    {
      GpuGroup nccl(host, parts(kNever));
      CHECK(nccl.describe().find("NCCL 2.28.9; no peer memory; rank 0: RINGLET_PEER_MEMORY_BYTES is 0") == 0);
      nccl.run(floats.call, own.stream)->wait(kLong);
    }
    GpuGroup both(host, parts());
    CHECK_EQ(both.describe(), "peer memory up to 1048576 bytes, NCCL 2.28.9 beyond");
    both.run(floats.call, own.stream)->wait(kLong);
    CHECK_EQ(floats.values[0], 54.0f);
  });
  run_well(2, Between::one_memory, [&](Communicator& host) {
    GpuGroup group(host, without_nccl());
    RankFloats floats(host.rank());
    const std::vector<Message> messages = {{1 - host.rank(), true, DType::uint8, 8, nullptr, {}}};
    const std::string message = CHECK_THROWS(InvalidUsage, group.exchange(messages, nullptr));
    CHECK(message.find("send and recv on a GPU need NCCL") == 0);
    Blocks blocks;
    Call uneven = floats.call;
    uneven.blocks = &blocks;
    CHECK_THROWS(InvalidUsage, group.run(uneven, nullptr));
    group.run(floats.call, nullptr)->wait(kLong);
    CHECK_EQ(floats.values[0], 3.0f);
  });
}

/// NCCL refuses one rank while the others wait for it: they hear why, and peers' memory serves all.
TEST(refused_by_nccl) {
  constexpr auto kTimeout = std::chrono::seconds(10);
  const auto body = [&](Communicator& host) {
    GpuExecutors::Parts mine = parts();
    NcclApi api = *mine.nccl;
    if (host.rank() == 1) {
      api.comm_init_rank_config = [](NcclComm*, int, NcclUniqueId, int, NcclConfig*) { return 5; };
    }
    api.comm_abort = [](NcclComm comm) {  // takes its time, as NCCL's does
      std::this_thread::sleep_for(std::chrono::milliseconds(300));
      return parts().nccl->comm_abort(comm);
    };
    mine.nccl = &api;
    GpuGroup group(host, mine);
    CHECK(group.describe().find("peer memory; no NCCL; rank 0: ncclCommInitRankConfig of rank 0 of 3 was not done") ==
          0);
    CHECK_HAS(group.describe(), "; rank 1: ncclCommInitRankConfig of rank 1 of 3: ");
    RankFloats floats(host.rank());
    group.run(floats.call, nullptr)->wait(kLong);
    CHECK_EQ(floats.values[0], 6.0f);
  };
  run_well(3, Between::one_memory, body, kTimeout);
}

/// On device 3, which becomes the thread's.
GpuExecutors::Parts third() {
  GpuExecutors::Parts mine = parts();
  mine.number = 3;
  device().use(mine.number);
  return mine;
}

/// The thread that completes calls is on the group's device, and on no other; so is all that a group does at its end.
TEST(on_its_device) {
  emulated_gpu_touched();
  run_well(2, Between::one_memory, [&](Communicator& host) {
    std::optional<GpuGroup> group(std::in_place, host, third());
    RankFloats floats(host.rank());
    const StreamOwner held;
    emulated_gpu_hold(held.stream, true);
    std::promise<int> completed_on;
    std::future<int> number = completed_on.get_future();
    group->run(floats.call, held.stream)->then([&](std::exception_ptr) {
      RingletCudaIdentity here{};
      device().identity(&here);
      completed_on.set_value(here.number);
    });
    emulated_gpu_hold(held.stream, false);
    CHECK(number.wait_for(kLong) == std::future_status::ready && number.get() == 3);
    device().use(0);
    group.reset();
    device().use(3);
  });
  CHECK_EQ(emulated_gpu_touched(), 1u << 3);
}

/// Nor does a thread that is elsewhere touch another device by ending the calls, or come to be on another.
TEST(aborted_from_elsewhere) {
  emulated_gpu_touched();
  run_well(2, Between::one_memory, [&](Communicator& host) {
    GpuGroup group(host, third());
    RankFloats floats(host.rank());
    device().use(0);
    group.abort("enough");
    RingletCudaIdentity here{};
    device().identity(&here);
    CHECK_EQ(here.number, 0);
    device().use(3);
    CHECK_THROWS(PeerLost, group.run(floats.call, nullptr));
  });
  CHECK_EQ(emulated_gpu_touched(), 1u << 3);
}

/// Messages of a batch move together, both ways at once; what a GPU's cannot have is refused.
TEST(messages) {
  run_well(3, Between::one_memory, [&](Communicator& host) {
    GpuGroup group(host, parts());
    const StreamOwner one, two;
    std::vector<float> mine(50000, static_cast<float>(host.rank())), theirs(50000);
    const int next = (host.rank() + 1) % 3, last = (host.rank() + 2) % 3;
    const auto bytes = [](std::vector<float>& of) { return reinterpret_cast<std::byte*>(of.data()); };
    const Message send{next, true, DType::float32, 50000, bytes(mine), {}};
    const Message recv{last, false, DType::float32, 50000, bytes(theirs), {}};
    for (void* stream : {one.stream, two.stream}) {
      group.exchange({send, recv}, stream)->wait(kLong);
      CHECK_EQ(theirs[49999], static_cast<float>(last));
    }
    Message wrong = recv;
    wrong.peer = kAnySource;
    CHECK_THROWS(InvalidUsage, group.exchange({wrong}, one.stream));
    wrong = send;
    wrong.tag = 1;
    CHECK_THROWS(InvalidUsage, group.exchange({wrong}, one.stream));
    wrong.peer = host.rank();
    CHECK_THROWS(InvalidUsage, group.exchange({wrong}, one.stream));
    host.run(Call{});
    if (host.rank() != 0) return;
    Message alone = recv;
    alone.timeout = std::chrono::milliseconds(50);
    const std::string message = CHECK_THROWS(Timeout, group.exchange({alone}, one.stream)->wait(kLong));
    CHECK(message.find("recv from rank 2 (200000 bytes)") == 0);
  });
}

/// What becomes part of a graph is complete at once, and waits for no call outside.
TEST(captured) {
  run_well(1, Between::one_memory, [&](Communicator& host) {
    GpuGroup group(host, parts());
    const StreamOwner one, two;
    RankFloats floats(0);
    emulated_gpu_hold(one.stream, true);
    const auto before = group.run(floats.call, one.stream);
    emulated_gpu_capture(true);
    CHECK(group.run(floats.call, two.stream)->done());
    emulated_gpu_capture(false);
    emulated_gpu_wait(two.stream);
    CHECK(!before->done());
    const auto behind = group.run(floats.call, two.stream);
    emulated_gpu_hold(one.stream, false);
    behind->wait(kLong);
    CHECK(before->done());
  });
}

/// Kernels are loaded when ranks meet, before any runs that another could have to wait for.
TEST(loaded_at_once) {
  const int before = emulated_gpu_loads();
  run_well(3, Between::one_memory, [&](Communicator& host) {
    GpuGroup group(host, parts());
    CHECK_EQ(emulated_gpu_loads() - before, 3);
    host.run(Call{});
  });
}

/// The host is free while the device waits for a rank that comes later.
TEST(asynchronous) {
  std::atomic<bool> came{false};
  run_well(2, Between::one_memory, [&](Communicator& host) {
    RankFloats floats(host.rank(), 300000);
    const StreamOwner own;
    GpuGroup group(host, parts());
    if (host.rank() == 1) {
      while (!came) std::this_thread::yield();
    }
    const auto work = group.run(floats.call, own.stream);
    if (host.rank() == 0) CHECK(!work->done());
    came = true;
    work->wait(kLong);
    CHECK_EQ(floats.values[299999], 3.0f);
  });
}

/// What runs at a call's completion may make the next one.
TEST(completions) {
  run_well(2, Between::one_memory, [&](Communicator& host) {
    Work all;
    RankFloats floats(host.rank());
    GpuGroup group(host, parts());
    group.run(floats.call, nullptr)->then([&](std::exception_ptr error) {
      CHECK(error == nullptr && group.is_this_thread());
      group.run(floats.call, nullptr)->then([&](std::exception_ptr second) { all.complete(second); });
    });
    all.wait(kLong);
    CHECK_EQ(floats.values[0], 6.0f);
  });
}

/// Wrong calls are refused before anything moves, and do not count.
TEST(refusals) {
  run_well(2, Between::one_memory, [&](Communicator& host) {
    RankFloats floats(host.rank());
    GpuGroup group(host, parts());
    if (host.rank() == 0) {
      Call wrong = floats.call;
      wrong.op = ReduceOp::band;
      CHECK_THROWS(InvalidUsage, group.run(wrong, nullptr));
      wrong = floats.call;
      wrong.collective = Collective::broadcast;
      wrong.root = 2;
      CHECK_THROWS(InvalidUsage, group.run(wrong, nullptr));
    }
    void* const per_thread = reinterpret_cast<void*>(2);
    const std::string message = CHECK_THROWS(InvalidUsage, group.run(floats.call, per_thread));
    CHECK(message.find("all_reduce #0 (auto, sum, float32, 1000 elements) on a GPU: cudaStreamPerThread") == 0);
    group.run(floats.call, nullptr)->wait(kLong);
    CHECK_EQ(floats.values[0], 3.0f);
  });
}

}  // namespace
