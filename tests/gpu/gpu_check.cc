// What only a GPU can show of the kernels and the pull engine; `make gpu-check` runs it. Ranks are virtual: one process, one
// stream each, all on device 0. One GPU cannot show what lies between GPUs: neither bandwidth nor a fence that is missing.
//
// Prints a line per result, "name<TAB>figure<TAB>unit", and ends with 1 where a result was wrong, with 2 where there is no GPU.
#include <dlfcn.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "collective_cases.h"
#include "engine/gpu.h"
#include "engine/gpu_pull.h"
#include "transport/nccl_api.h"

using namespace ringlet;
using namespace collective_cases;

namespace {

const RingletCudaDevice* device = nullptr;

void ok(int code) {
  if (code != 0) throw DeviceError(device->explain(code));
}

/// A stream that no kernel is on.
void* beside() {
  static void* const stream = [] {
    void* made = nullptr;
    ok(device->create_stream(&made));
    return made;
  }();
  return stream;
}

void tell(const std::string& name, double figure, const char* unit) {
  std::printf("%s\t%.6g\t%s\n", name.c_str(), figure, unit);
  std::fflush(stdout);
}

struct Memory {
  explicit Memory(size_t bytes) : bytes(bytes) {
    void* memory = nullptr;
    ok(device->allocate(&memory, std::max<size_t>(bytes, 1)));
    data = static_cast<std::byte*>(memory);
  }
  ~Memory() { device->release(data); }
  Memory(const Memory&) = delete;
  void fill(const Bytes& from) { ok(device->upload(data, from.data(), from.size(), beside())); }
  Bytes read() const {
    Bytes all(bytes);
    ok(device->download(all.data(), data, bytes, beside()));
    return all;
  }
  size_t bytes;
  std::byte* data;
};

struct Stream {
  Stream() {
    ok(device->create_stream(&stream));
    ok(device->create_event(&event));
  }
  ~Stream() {
    device->destroy_event(event);
    device->destroy_stream(stream);
  }
  Stream(const Stream&) = delete;
  void wait() {
    ok(device->record(event, stream));
    for (int done = 0; done == 0;) ok(device->finished(event, &done));
  }
  void* stream = nullptr;
  void* event = nullptr;
};

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

double seconds(const std::function<void()>& act) {
  const auto start = std::chrono::steady_clock::now();
  act();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

/// The bytes that a reduction of two moves in a second, in times of those that a copy does: medians of paired ratios.
void bandwidth() {
  constexpr size_t kBytes = size_t{256} << 20;
  constexpr int kCalls = 20, kRounds = 9;
  Memory a(kBytes), b(kBytes), to(kBytes);
  for (Memory* memory : {&a, &b}) memory->fill(Bytes(kBytes));
  Stream stream;
  const std::byte* sources[] = {a.data, b.data};
  for (const DType dtype : {DType::float32, DType::bfloat16}) {
    ReduceArgs args{};
    args.dst = to.data;
    args.srcs = sources;
    args.n = 2;
    args.count = kBytes / element_size(dtype);
    args.scaled_source = -1;
    args.divisor = 1;
    const auto time = [&](const std::function<int()>& enqueue) {
      ok(enqueue());
      stream.wait();
      return seconds([&] {
               for (int i = 0; i < kCalls; ++i) ok(enqueue());
               stream.wait();
             }) /
             kCalls;
    };
    std::vector<double> copies, ratios;
    for (int round = 0; round < kRounds; ++round) {
      const double copy = time([&] { return device->copy(to.data, a.data, kBytes, stream.stream); });
      const double reduce = time([&] { return device->reduce(&args, dtype, ReduceOp::sum, stream.stream); });
      copies.push_back(2 * kBytes / copy / 1e9);
      ratios.push_back(3.0 / 2 * copy / reduce);
    }
    const std::string of = std::string(" of ") + name(dtype) + ", 256 MiB";
    tell("copy" + of, median(copies), "GB/s");
    tell("sum of two" + of, median(ratios), "of the copy's bandwidth");
  }
}

/// A rank of the pull engine, with its tensors on the device.
struct Rank {
  Rank(const Case& c, int rank, const GpuPullEngine::Setup& setup)
      : call(call_of(c, rank)),
        given(numbers(c, rank, input_elements(call, rank, c.world))),
        input(given.size()),
        output(output_elements(call, rank, c.world) * element_size(c.dtype)),
        engine(*device, setup) {
    input.fill(given);
    call.input = input.data;
    call.output = output.data;
  }
  Call call;
  Bytes given;
  Memory input, output;
  GpuPullEngine engine;
  Stream stream;
};

/// A world of virtual ranks: their regions, zeroed, and how many blocks each may have beside the others.
struct World {
  explicit World(int world, size_t region_bytes = size_t{4} << 20) : blocks(std::max(1, std::min(16, 96 / world))) {
    for (int q = 0; q < world; ++q) {
      regions.push_back(std::make_unique<Memory>(region_bytes));
      regions.back()->fill(Bytes(region_bytes));
    }
  }
  /// `registered`: everything is in a heap that begins at 0.
  GpuPullEngine::Setup setup(int rank, bool registered = false) const {
    GpuPullEngine::Setup setup{rank, static_cast<int>(regions.size()), {}, regions[0]->bytes, blocks};
    for (const auto& region : regions) setup.regions.push_back(region->data);
    setup.heaps.assign(regions.size(), nullptr);
    setup.heap_bytes = registered ? SIZE_MAX : 0;
    return setup;
  }
  std::vector<std::unique_ptr<Memory>> regions;
  int blocks;
};

/// `world` has served other cases before: their stages are where this one's will be.
void pull_case(const World& world, const Case& c, bool registered) {
  std::vector<std::unique_ptr<Rank>> ranks;
  std::vector<Bytes> inputs;
  for (int q = 0; q < c.world; ++q) {
    ranks.push_back(std::make_unique<Rank>(c, q, world.setup(q, registered)));
    inputs.push_back(ranks.back()->given);
  }
  for (auto& rank : ranks) rank->engine.run(rank->call, rank->stream.stream);
  bool right = true;
  for (int q = 0; q < c.world; ++q) {
    Rank& rank = *ranks[static_cast<size_t>(q)];
    rank.stream.wait();
    rank.engine.check();
    right = right && (rank.output.bytes == 0 || rank.output.read() == expected(c, q, inputs));
  }
  check_report(right, __FILE__, __LINE__, describe_case(c) + (registered ? " registered" : " staged"));
}

void pull_contract() {
  int cases = 0;
  for (const int size : {2, 3, 4, 8}) {
    const World world(size);
    for (const Algorithm& algorithm : algorithms()) {
      for (const size_t count : {size_t{1}, static_cast<size_t>(size + 1), size_t{123567}}) {
        Case c{&algorithm, size, algorithm.collective == Collective::barrier ? 0 : count};
        for (const bool registered : {false, true}) pull_case(world, c, registered), ++cases;
      }
    }
    for (const char* name : {"ring", "butterfly", "one_shot", "two_shot"}) {
      for (int d = 0; d < kDTypes; ++d) {
        for (int o = 0; o < kReduceOps; ++o) {
          const Case c{find_algorithm(Collective::all_reduce, name), size, 1237, static_cast<DType>(d),
                       static_cast<ReduceOp>(o)};
          if (supports(c.dtype, c.op)) pull_case(world, c, false), ++cases;
        }
      }
    }
  }
  tell("pull engine, worlds 2 3 4 8: cases", cases, "exact or reported above");
}

/// NCCL's own all-reduce on virtual ranks: their calls are one group of one thread, as it demands of them.
class NcclRanks {
 public:
  explicit NcclRanks(int world) : api_(nccl_api()), comms_(static_cast<size_t>(world)) {
    void* library = ::dlopen(api_.path.c_str(), RTLD_NOW | RTLD_NOLOAD);
    all_reduce_ = reinterpret_cast<AllReduce>(library == nullptr ? nullptr : ::dlsym(library, "ncclAllReduce"));
    if (all_reduce_ == nullptr) throw DeviceError(api_.path + " has no ncclAllReduce");
    NcclUniqueId id{};
    take(api_.get_unique_id(&id));
    std::vector<NcclConfig> configs(comms_.size());
    take(api_.group_start());
    for (size_t q = 0; q < comms_.size(); ++q) {
      configs[q].blocking = 1;
      take(api_.comm_init_rank_config(&comms_[q], world, id, static_cast<int>(q), &configs[q]));
    }
    take(api_.group_end());
  }
  ~NcclRanks() {
    for (NcclComm comm : comms_) api_.comm_abort(comm);
  }
  NcclRanks(const NcclRanks&) = delete;

  void sum_of_floats(const std::vector<std::unique_ptr<Rank>>& ranks) {
    take(api_.group_start());
    for (size_t q = 0; q < comms_.size(); ++q) {
      const Rank& rank = *ranks[q];
      take(all_reduce_(rank.input.data, rank.output.data, rank.call.count, /*ncclFloat=*/7, /*ncclSum=*/0, comms_[q],
                       rank.stream.stream));
    }
    take(api_.group_end());
  }

 private:
  using AllReduce = int (*)(const void*, void*, size_t, int, int, NcclComm, NcclStream);
  void take(int result) const {
    if (result != kNcclSuccess) throw DeviceError(std::string("NCCL: ") + api_.get_error_string(result));
  }

  const NcclApi& api_;
  std::vector<NcclComm> comms_;
  AllReduce all_reduce_ = nullptr;
};

/// All ranks' calls are enqueued by one thread; the time is until the last is done.
double microseconds(const std::vector<std::unique_ptr<Rank>>& ranks, const std::function<void()>& all_call) {
  constexpr int kCalls = 200;
  const auto wait = [&] {
    for (const auto& rank : ranks) rank->stream.wait();
  };
  for (int i = 0; i < 20; ++i) all_call();
  wait();
  return 1e6 / kCalls * seconds([&] {
           for (int i = 0; i < kCalls; ++i) all_call();
           wait();
         });
}

/// ringlet's kernel and NCCL's in turns; "ratio": NCCL's time over ringlet's, median of pairs.
void pull_speed() {
  for (const int size : {2, 4}) {
    std::unique_ptr<NcclRanks> nccl;
    try {
      nccl = std::make_unique<NcclRanks>(size);
    } catch (const DeviceError& error) {
      std::printf("%d ranks of NCCL on one GPU cannot be had: %s\n", size, error.what());
    }
    for (size_t bytes = 256; bytes <= size_t{1} << 20; bytes *= 4) {
      for (const char* algorithm : {"one_shot", "two_shot"}) {
        const World world(size);
        const Case c{find_algorithm(Collective::all_reduce, algorithm), size, bytes / 4, DType::float32};
        std::vector<std::unique_ptr<Rank>> ranks;
        for (int q = 0; q < size; ++q) ranks.push_back(std::make_unique<Rank>(c, q, world.setup(q)));
        std::vector<double> own, ratios;
        for (int round = 0; round < 7; ++round) {
          own.push_back(microseconds(ranks, [&] {
            for (auto& rank : ranks) rank->engine.run(rank->call, rank->stream.stream);
          }));
          if (nccl) ratios.push_back(microseconds(ranks, [&] { nccl->sum_of_floats(ranks); }) / own.back());
        }
        for (auto& rank : ranks) rank->engine.check();
        const std::string what =
            std::string(algorithm) + ", " + std::to_string(size) + " virtual ranks, " + std::to_string(bytes) + " B";
        tell(what, median(own), "us");
        if (nccl) tell(what + ": NCCL's time", median(ratios), "of ringlet's");
      }
    }
  }
}

/// A rank that does not come: the other's kernel ends by itself, and says for whom it waited.
void a_missing_rank() {
  const World world(2);
  const Case c{find_algorithm(Collective::all_reduce, "ring"), 2, 1000};
  Rank rank(c, 0, world.setup(0));
  rank.call.timeout = std::chrono::milliseconds(50);
  rank.engine.run(rank.call, rank.stream.stream);
  rank.stream.wait();
  const std::string message = CHECK_THROWS(Timeout, rank.engine.check());
  CHECK(message.find("for rank 1") != std::string::npos);
}

}  // namespace

int main(int arguments, char** words) {
  const GpuStatus status = gpu_status();
  std::printf("device\t%s\t%s\n", status.detail.c_str(), status.state.c_str());
  if (status.state != "ready") {
    std::fprintf(stderr, "gpu_check: %s: %s; %s\n", status.state.c_str(), status.detail.c_str(), status.advice.c_str());
    return 2;
  }
  device = &gpu_device();
  // Under a sanitizer only what is right matters, and less of it.
  const bool all = arguments < 2 || std::string(words[1]) != "--contract-only";
  if (all) bandwidth();
  a_missing_rank();
  pull_contract();
  if (all) pull_speed();
  return check_result("gpu_check");
}
