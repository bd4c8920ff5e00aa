// Groups on GPUs of several hosts, ranks as threads on a GPU and a NCCL of the host that run (emulated_gpu.cc): peers'
// memory inside hosts, NCCL between them.
#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "check.h"
#include "collective_cases.h"
#include "comm/gpu_group.h"
#include "emulated_gpu.h"
#include "gpu_ranks.h"

using namespace gpu_ranks;
using namespace collective_cases;

namespace {

struct Hosts {
  Between between;
  int world;
};
constexpr Hosts kHosts[] = {{Between::twos, 4}, {Between::threes, 6}, {Between::twos, 6}};

constexpr Collective kOthers[] = {Collective::reduce, Collective::reduce_scatter, Collective::all_gather,
                                  Collective::gather, Collective::scatter};

/// Any algorithm, for a Case that is called without its name.
const Algorithm* some(Collective which) {
  const auto all = algorithms();
  return &*std::find_if(all.begin(), all.end(), [=](const Algorithm& a) { return a.collective == which; });
}

/// Whether a kernel ran on peers' memory since this was asked last; by one rank, between calls of the host's group.
bool went_through_peers(Communicator& host) {
  static std::atomic<bool> answer{false};
  host.run(Call{});
  if (host.rank() == 0) answer = emulated_gpu_most_blocks() > 0;
  host.run(Call{});
  return answer;
}

/// What all ranks put on streams.
struct Enqueued {
  int kernels, groups, messages, natives;
  bool operator==(const Enqueued&) const = default;
};
Enqueued enqueued_by_now(Communicator& host) {
  static std::mutex mutex;  // ranks that other processes could be meet in ways that ThreadSanitizer does not see
  static Enqueued answer;
  host.run(Call{});
  if (host.rank() == 0) {
    const std::lock_guard lock(mutex);
    answer = {emulated_gpu_pulls(), emulated_gpu_groups(), emulated_gpu_messages(), emulated_gpu_natives()};
  }
  host.run(Call{});
  const std::lock_guard lock(mutex);
  return answer;
}
template <class Act>
Enqueued enqueued_by(Communicator& host, const Act& act) {
  const Enqueued before = enqueued_by_now(host);
  act();
  const Enqueued after = enqueued_by_now(host);
  return {after.kernels - before.kernels, after.groups - before.groups, after.messages - before.messages,
          after.natives - before.natives};
}

void run(Communicator& host, GpuGroup& group, const Case& c, bool by_name, void* stream) {
  Tensors tensors(c, host.rank());
  tensors.write_input();
  if (!by_name) tensors.call.algorithm = nullptr;
  group.run(tensors.call, stream)->wait(kLong);
  emulated_gpu_wait(stream);  // a call of a CUDA graph is complete at once
  std::vector<Bytes> inputs;
  for (int q = 0; q < c.world; ++q) inputs.push_back(Tensors(c, q).given);
  tensors.read_output();
  check_report(tensors.good(expected(c, host.rank(), inputs)), __FILE__, __LINE__, describe_case(c));
}

/// All counts, dtypes and operations; shards of no elements; every root.
void contract(const Hosts& hosts) {
  no_errors(run_ranks(hosts.world, hosts.between, [&](Communicator& host) {
    GpuGroup group(host, parts());
    const StreamOwner own;
    CHECK_EQ(group.describe(), "peer memory up to 1048576 bytes inside hosts, NCCL 2.28.9 between them and beyond");
    went_through_peers(host);
    const Algorithm* reduces = find_algorithm(Collective::all_reduce, "hierarchical");
    for (const size_t count : {0, 1, 2, 1237, 60001}) {
      for (const bool in_place : {true, false}) {
        run(host, group, {reduces, hosts.world, count, DType::int32, ReduceOp::sum, in_place}, in_place, own.stream);
      }
    }
    CHECK(went_through_peers(host));
    for (int d = 0; d < kDTypes; ++d) {
      for (int o = 0; o < kReduceOps; ++o) {
        Case c{reduces, hosts.world, 123, static_cast<DType>(d), static_cast<ReduceOp>(o), (d + o) % 2 == 0};
        c.offset = element_size(c.dtype);
        if (supports(c.dtype, c.op)) run(host, group, c, d % 2 == 0, own.stream);
      }
    }
    went_through_peers(host);
    for (int root = 0; root < hosts.world; ++root) {
      Case c{find_algorithm(Collective::broadcast, "hierarchical"), hosts.world, root == 1 ? size_t{0} : 1237};
      c.seed = static_cast<unsigned>(root);
      c.in_place = root % 2 == 0;
      run(host, group, c, root > 2, own.stream);
    }
    CHECK(went_through_peers(host));
  }));
}

/// The other collectives: all counts and roots, in place and not, dtypes and operations.
void contract_of_others(const Hosts& hosts) {
  no_errors(run_ranks(hosts.world, hosts.between, [&](Communicator& host) {
    GpuGroup group(host, parts());
    const StreamOwner own;
    for (const Collective which : kOthers) {
      const Algorithm* named = find_algorithm(which, "hierarchical");
      Case c{named != nullptr ? named : some(which), hosts.world, 0};
      const unsigned roots = has_root(which) ? static_cast<unsigned>(hosts.world) : 1;
      went_through_peers(host);
      for (c.seed = 0; c.seed < roots; ++c.seed) {
        for (const size_t count : {0, 1, 2, 1237, 20011}) {
          for (const bool in_place : {true, false}) {
            if (kSanitized && count > 2000) continue;
            c.count = count;
            c.in_place = in_place;
            run(host, group, c, named != nullptr && in_place, own.stream);
          }
        }
      }
      check_report(went_through_peers(host), __FILE__, __LINE__, describe_case(c));
      c.count = 23;
      for (int d = 0; d < kDTypes; ++d) {
        for (int o = 0; o < (is_reduction(which) ? kReduceOps : 1); ++o) {
          c.dtype = static_cast<DType>(d);
          c.op = static_cast<ReduceOp>(o);
          c.in_place = (d + o) % 2 == 0;
          c.seed = static_cast<unsigned>(d + o);
          c.offset = element_size(c.dtype);
          if (supports(c.dtype, c.op)) run(host, group, c, false, own.stream);
        }
      }
    }
  }));
}

/// On two hosts of three ranks; without peers' memory inside the hosts, or in other steps, none of these would be right.
void steps() {
  no_errors(run_ranks(6, Between::threes, [&](Communicator& host) {
    GpuGroup group(host, parts());
    const StreamOwner own;
    const auto puts = [&](Collective which, DType dtype, const Enqueued& wanted) {
      Case c{some(which), 6, 1000, dtype};
      c.seed = 4;
      const Enqueued found = enqueued_by(host, [&] { run(host, group, c, false, own.stream); });
      check_report(found == wanted, __FILE__, __LINE__,
                   describe_case(c) + ": " + std::to_string(found.kernels) + " kernels, " +
                       std::to_string(found.groups) + " groups, " + std::to_string(found.messages) + " messages, " +
                       std::to_string(found.natives) + " collectives");
    };
    // Each rank's kernels; then those that look what NCCL's step told, of who has a result of that.
    puts(Collective::all_reduce, DType::float32, {6 + 6, 6, 0, 12});
    puts(Collective::broadcast, DType::float32, {6, 2, 0, 4});
    puts(Collective::reduce, DType::float32, {6 + 2, 2, 0, 4});
    puts(Collective::reduce_scatter, DType::float32, {2 * 6 + 6, 6, 0, 12});
    puts(Collective::all_gather, DType::float32, {2 * 6, 6, 12, 6});
    puts(Collective::gather, DType::float32, {6 + 2, 2, 2, 2});
    puts(Collective::scatter, DType::float32, {6, 2, 2, 2});
  }));
}

/// All of it may become part of a graph: nothing is waited for or allocated.
void captured() {
  no_errors(run_ranks(4, Between::twos, [&](Communicator& host) {
    GpuGroup group(host, parts());
    const StreamOwner own;
    const int before = (host.run(Call{}), emulated_gpu_allocations());
    host.run(Call{});
    if (host.rank() == 0) emulated_gpu_capture(true);
    host.run(Call{});
    for (const Collective which : kOthers) run(host, group, {some(which), 4, 1000}, false, own.stream);
    host.run(Call{});
    if (host.rank() == 0) emulated_gpu_capture(false);
    CHECK_EQ(emulated_gpu_allocations(), before);
    host.run(Call{});
    run(host, group, {some(Collective::reduce), 4, 1000}, false, own.stream);
  }));
}

/// What scratch has no room for, and blocks of ranks where those of a host do not follow each other, go through NCCL
/// alone, as the group says.
void limits() {
  const auto found = [](Communicator& host, GpuGroup& group, const Case& c) {
    const StreamOwner own;
    return enqueued_by(host, [&] { run(host, group, c, false, own.stream); }).kernels > 0;
  };
  no_errors(run_ranks(4, Between::twos, [&](Communicator& host) {
    GpuGroup group(host, parts(size_t{64} << 20));
    const std::string said = "; NCCL alone for reduce, reduce_scatter, gather and scatter beyond 4194304 bytes";
    CHECK(group.describe().find(said) != std::string::npos);
    for (const Collective which : kOthers) {
      if (kSanitized && which != Collective::reduce && which != Collective::all_gather) continue;
      const size_t most = (size_t{1} << 20) / (which == Collective::reduce ? 1 : 4);
      for (const size_t count : {most, most + 1}) {
        const bool peers = count == most || which == Collective::all_gather;
        check_report(found(host, group, {some(which), 4, count}) == peers, __FILE__, __LINE__, name(which));
      }
    }
  }));
  no_errors(run_ranks(4, Between::mixed, [&](Communicator& host) {
    GpuGroup group(host, parts());
    const std::string said =
        "; NCCL alone for reduce_scatter, all_gather, gather and scatter, since ranks of a host do not follow each "
        "other";
    CHECK(group.describe().find(said) != std::string::npos);
    for (const Collective which : kOthers) {
      const bool peers = which == Collective::reduce;
      for (unsigned root = 0; root < 4; ++root) {
        Case c{some(which), 4, 1237};
        c.seed = root;
        check_report(found(host, group, c) == peers, __FILE__, __LINE__, name(which));
      }
    }
    CHECK(found(host, group, {some(Collective::all_reduce), 4, 1237}));
    CHECK(found(host, group, {some(Collective::broadcast), 4, 1237}));
  }));
}

/// What is longer, has another algorithm or another shape goes through NCCL alone.
void through_nccl() {
  no_errors(run_ranks(4, Between::twos, [&](Communicator& host) {
    GpuGroup group(host, parts());
    const StreamOwner own;
    const auto goes = [&](Collective which, const char* algorithm, size_t count) {
      went_through_peers(host);
      run(host, group, {find_algorithm(which, algorithm), 4, count}, true, own.stream);
      return went_through_peers(host);
    };
    CHECK(goes(Collective::all_reduce, "hierarchical", 1000));
    CHECK(!goes(Collective::all_reduce, "ring", 1000));
    CHECK(!goes(Collective::all_reduce, "hierarchical", 300000));
    CHECK(!goes(Collective::all_gather, "two_shot", 1000));
    CHECK(!goes(Collective::all_to_all, "pairwise", 1000));
  }));
}

/// Without equally many ranks on all hosts, or several on one, NCCL alone serves the group; without NCCL nothing does.
void without() {
  const auto described = [](Between between, int world, const char* why) {
    no_errors(run_ranks(world, between, [&](Communicator& host) {
      Floats floats(host.rank());
      const StreamOwner own;
      GpuGroup group(host, parts());
      CHECK(group.describe().find(why) != std::string::npos);
      group.run(floats.call, own.stream)->wait(kLong);
      CHECK_EQ(floats.values[0], static_cast<float>(world * (world + 1) / 2));
    }));
  };
  described(Between::twos, 5, "no peer memory; rank 0: hosts with different numbers of ranks");
  described(Between::tcp, 2, "no peer memory; rank 0: no host has several ranks");
  std::atomic<int> told{0};
  no_errors(run_ranks(4, Between::twos, [&](Communicator& host) {
    const std::string message = CHECK_THROWS(DeviceError, GpuGroup(host, host.rank() == 2 ? without_nccl() : parts()));
    told += message.find("rank 2: no NCCL: gone fishing") != std::string::npos;
  }));
  CHECK_EQ(told.load(), 4);
}

/// Ranks of a host that call different things, and a rank that does not come: named by their numbers in the group. On
/// other hosts no call ends well with a shard that is not one.
void failures() {
  std::atomic<int> told{0};
  no_errors(run_ranks(4, Between::twos, [&](Communicator& host) {
    Floats floats(host.rank());  // kept until the stream has come to its end
    const StreamOwner own;
    GpuGroup group(host, parts());
    if (host.rank() == 3) floats.call.op = ReduceOp::max;
    const auto run = [&] { group.run(floats.call, own.stream)->wait(kSoon); };
    if (host.rank() < 2) {  // its device may say that a rank gave up before that rank's host says why
      CHECK_THROWS(Error, run());
      return;
    }
    const std::string message = CHECK_THROWS(InvalidUsage, run());
    told += message.find("calls do not match") != std::string::npos &&
            message.find(", max, float32") != std::string::npos &&
            (message.find("rank 2 called") != std::string::npos || message.find("rank 3 called") != std::string::npos);
  }));
  CHECK_EQ(told.load(), 2);
  told = 0;
  no_errors(run_ranks(4, Between::twos, [&](Communicator& host) {
    Floats floats(host.rank());
    const StreamOwner own;
    GpuGroup group(host, parts());
    if (host.rank() == 3) {
      const Deadline deadline = Deadline::after(kSoon);
      CHECK_THROWS(Timeout, while (!deadline.passed()) host.poll_failures(););
      return;
    }
    floats.call.timeout = std::chrono::milliseconds(200);
    CHECK_THROWS(Timeout, group.run(floats.call, own.stream)->wait(kSoon));
    CHECK_THROWS(Timeout, group.run(floats.call, own.stream));
    ++told;
  }));
  CHECK_EQ(told.load(), 3);
}

/// Who ended how, in a call that rank 3 makes with another dtype, or does not make. Ranks 2 and 3 are on one host.
struct Ending {
  Collective collective;
  int root;
  std::vector<int> refused;  // named both calls: those who need what the other has
  std::vector<int> late;     // do not end well if rank 3 does not come: those who need what comes from it
};
const Ending kEndings[] = {
    {Collective::reduce, 0, {2}, {0, 2}},           {Collective::reduce_scatter, 0, {2, 3}, {0, 1, 2}},
    {Collective::all_gather, 0, {2, 3}, {0, 1, 2}}, {Collective::gather, 0, {2}, {0, 2}},
    {Collective::scatter, 1, {2}, {0, 1, 2}},
};
bool among(const std::vector<int>& ranks, int rank) {
  return std::find(ranks.begin(), ranks.end(), rank) != ranks.end();
}

void endings_of_others(const Ending& ending) {
  const auto tensors = [&](int rank, DType dtype) {
    Case c{some(ending.collective), 4, 1000, dtype};
    c.seed = static_cast<unsigned>(ending.root);
    auto made = std::make_unique<Tensors>(c, rank);  // kept until the stream has come to its end
    made->write_input();
    made->call.algorithm = nullptr;
    return made;
  };
  no_errors(run_ranks(4, Between::twos, [&](Communicator& host) {
    const auto kept = tensors(host.rank(), host.rank() == 3 ? DType::float32 : DType::int32);
    const StreamOwner own;
    GpuGroup group(host, parts());
    std::string message;
    try {
      group.run(kept->call, own.stream)->wait(kSoon);
    } catch (const Error& error) {
      message = error.what();
    }
    const bool told = message.find("calls do not match: rank ") != std::string::npos &&
                      message.find("float32") != std::string::npos && message.find("int32") != std::string::npos;
    if (among(ending.refused, host.rank())) check_report(told, __FILE__, __LINE__, message);
    // One host's ranks alone compare: on the other host a sum, or blocks, of such calls are no result.
    const bool takes = ending.collective == Collective::reduce_scatter || host.rank() == ending.root;
    if (host.rank() < 2 && takes && ending.collective != Collective::scatter &&
        ending.collective != Collective::all_gather) {
      CHECK(!message.empty());
    }
  }));
  no_errors(run_ranks(4, Between::twos, [&](Communicator& host) {
    const auto kept = tensors(host.rank(), DType::int32);
    const StreamOwner own;
    GpuGroup group(host, parts());
    if (host.rank() == 3) {
      const Deadline deadline = Deadline::after(kSoon);
      CHECK_THROWS(Timeout, while (!deadline.passed()) host.poll_failures(););
      return;
    }
    kept->call.timeout = std::chrono::milliseconds(200);
    if (among(ending.late, host.rank())) {
      const std::string message = CHECK_THROWS(Timeout, group.run(kept->call, own.stream)->wait(kSoon));
      CHECK(message.find(name(ending.collective)) != std::string::npos);
    }
  }));
}

/// Without hosts that tell each other of failures: what NCCL's step says is enough.
void told_across() {
  for (const Collective which : {Collective::reduce, Collective::gather}) {
    no_errors(run_ranks(4, Between::twos, [&](Communicator& host) {
      Tensors tensors({some(which), 4, 1000}, host.rank());
      const StreamOwner own;
      GpuExecutors engines(host, parts());
      tensors.call.algorithm = nullptr;
      tensors.call.timeout = std::chrono::milliseconds(200);
      if (host.rank() != 3) engines.run(tensors.call, own.stream);
      emulated_gpu_wait(own.stream);
      host.run(Call{});
      if (host.rank() == 2) {
        const std::string message = CHECK_THROWS(Timeout, engines.check("it"));
        CHECK(message.find("rank 2 of 4 in or before it on a GPU: ") == 0);
        CHECK(message.find("waited too long for rank 3") != std::string::npos);
      } else if (host.rank() == 0) {
        const std::string message = CHECK_THROWS(Timeout, engines.check("it"));
        CHECK(message.find("gave its call up, on this host or another one") != std::string::npos);
      }
      host.run(Call{});
    }));
  }
}

/// Rank 2's kernels have ended only because rank 3's gave up, of which the other host had no part: it must hear of that
/// all the same when rank 2 brings what a kernel did not make.
void told_of_a_peer() {
  no_errors(run_ranks(4, Between::twos, [&](Communicator& host) {
    const auto tensors = [&](Collective which, unsigned root) {
      Case c{some(which), 4, 1000};
      c.seed = root;
      auto made = std::make_unique<Tensors>(c, host.rank());
      made->call.algorithm = nullptr;
      made->call.timeout = std::chrono::milliseconds(200);
      return made;
    };
    const auto given = tensors(Collective::broadcast, 1), summed = tensors(Collective::reduce, 0);
    const StreamOwner own;
    GpuExecutors engines(host, parts());
    if (host.rank() == 2) emulated_gpu_hold(own.stream, true);
    for (int i = 0; i < 3; ++i) engines.run(given->call, own.stream);  // the third needs the first to be done
    if (host.rank() != 2) emulated_gpu_wait(own.stream);
    if (host.rank() == 3) {
      const std::string message = CHECK_THROWS(Timeout, engines.check("it"));
      CHECK(message.find("waited too long for rank 2") != std::string::npos);
    } else {
      engines.check("it");
    }
    host.run(Call{});
    if (host.rank() == 2) emulated_gpu_hold(own.stream, false);
    if (host.rank() != 3) engines.run(summed->call, own.stream);
    emulated_gpu_wait(own.stream);
    host.run(Call{});
    if (host.rank() == 0) CHECK_THROWS(Timeout, engines.check("it"));
    host.run(Call{});
  }));
}

}  // namespace

int main() {
  for (const Hosts& hosts : kHosts) contract(hosts);
  for (const Hosts& hosts : kHosts) contract_of_others(hosts);
  steps();
  captured();
  limits();
  through_nccl();
  without();
  failures();
  for (const Ending& ending : kEndings) endings_of_others(ending);
  told_across();
  told_of_a_peer();
  return check_result("gpu_hosts");
}
