#include "recording_nccl.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>

#include "cuda/table.h"

using namespace ringlet;

namespace {

constexpr int kInvalidUsage = 5;  // ncclInvalidUsage
FakeMachine* machine = nullptr;

FakeCommunicator* of(NcclComm comm) {
  auto* communicator = reinterpret_cast<FakeCommunicator*>(comm);
  if (communicator->ended) machine->violate("used after its end");
  return communicator;
}

FakeStream* of(void* stream) { return static_cast<FakeStream*>(stream); }

NcclApi make_nccl() {
  NcclApi api;
  api.version = 22809;
  api.path = "fake";
  api.get_version = [](int* version) { return *version = 22809, kNcclSuccess; };
  api.get_unique_id = [](NcclUniqueId* id) { return std::memset(id, 7, sizeof *id), kNcclSuccess; };
  api.comm_init_rank_config = [](NcclComm* comm, int world, NcclUniqueId, int rank, NcclConfig* config) {
    if (config->magic != 0xcafebeef || config->blocking != 1) machine->violate("config not initialized");
    machine->communicators.push_back(std::make_unique<FakeCommunicator>(rank, world));
    const FakeCommunicator& made = *machine->communicators.back();
    std::atomic_ref(*comm).store(reinterpret_cast<NcclComm>(machine->communicators.back().get()));
    return machine->connect(made);
  };
  api.comm_get_async_error = [](NcclComm comm, int* result) {
    of(comm);
    return *result = machine->state, kNcclSuccess;
  };
  api.comm_finalize = [](NcclComm comm) { return of(comm), kNcclSuccess; };
  api.comm_destroy = api.comm_abort = [](NcclComm comm) {
    FakeCommunicator* const communicator = of(comm);
    if (communicator->inside) machine->violate("ended while a call is inside");
    return communicator->ended = true, kNcclSuccess;
  };
  api.group_start = [] { return ++machine->open_groups, kNcclSuccess; };
  api.group_end = [] { return machine->close_group(); };
  api.send = [](const void* from, size_t count, int, int peer, NcclComm comm, NcclStream stream) {
    auto* address = static_cast<std::byte*>(const_cast<void*>(from));
    machine->add_part(of(comm), {true, peer, address, count, nullptr}, of(stream));
    return machine->open_groups > 0 ? kNcclSuccess : kInvalidUsage;
  };
  api.recv = [](void* to, size_t count, int, int peer, NcclComm comm, NcclStream stream) {
    machine->add_part(of(comm), {false, peer, static_cast<std::byte*>(to), count, nullptr}, of(stream));
    return machine->open_groups > 0 ? kNcclSuccess : kInvalidUsage;
  };
  api.get_error_string = [](int result) { return result == kNcclRemoteError ? "remote process exited" : "fake error"; };
  api.get_last_error = [](NcclComm) { return "said by the fake"; };
  return api;
}

int reduce(const ReduceArgs* args, DType dtype, ReduceOp op, void* stream) {
  if (machine->device_refuses != 0) return machine->device_refuses;
  const std::vector<const std::byte*> srcs(args->srcs, args->srcs + args->n);
  const ReduceArgs counted = cuda::in_counted(*args, dtype, op).args;
  const size_t size = args->count == 0 ? 1 : args->count * element_size(dtype) / counted.count;
  machine->one_by_one += cuda::make_work<cuda::kMostSources>(counted, op, size).packs == 0 && args->count >= 64;
  of(stream)->items.push_back({.act = [args = *args, srcs, dtype, op]() mutable {
    args.srcs = srcs.data();
    reduce_kernel(dtype, op)(args);
  }});
  return 0;
}

int copy(void* dst, const void* src, size_t bytes, void* stream) {
  of(stream)->items.push_back({.act = [=] { std::memcpy(dst, src, bytes); }});
  return 0;
}

int allocate(void** memory, size_t bytes) {
  auto owned = std::make_unique<std::byte[]>(bytes + 256);
  *memory = reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(owned.get()) + 255) / 256 * 256);
  machine->memory[*memory] = {std::move(owned), bytes};
  machine->allocated += bytes;
  return 0;
}

int release(void* memory) {
  machine->allocated -= machine->memory.at(memory).second;
  machine->memory.erase(memory);
  return 0;
}

int record(void* event, void* stream) {
  auto done = static_cast<FakeEvent*>(event)->last = std::make_shared<bool>(false);
  of(stream)->items.push_back({.sets = done});
  return 0;
}

int wait(void* stream, void* event) {
  if (const auto& last = static_cast<FakeEvent*>(event)->last) of(stream)->items.push_back({.waits = last});
  return 0;
}

int finished(void* event, int* answer) {
  const auto& last = static_cast<FakeEvent*>(event)->last;
  *answer = last == nullptr || *last;
  return 0;
}

bool overlap(const FakeMachine::Part& a, const FakeMachine::Part& b) {
  return a.address < b.address + b.bytes && b.address < a.address + a.bytes;
}

}  // namespace

FakeMachine::FakeMachine() { machine = this; }
FakeMachine::~FakeMachine() { machine = nullptr; }

const NcclApi& FakeMachine::nccl() {
  static const NcclApi api = make_nccl();
  return api;
}

const RingletCudaDevice& FakeMachine::device() {
  static const RingletCudaDevice table = {
      .bytes = sizeof(RingletCudaDevice),
      .serves = "nothing",
      .reduce = reduce,
      .most_sources = cuda::kMostSources,
      .copy = copy,
      .pull = nullptr,
      .pull_together = nullptr,
      .exchange = nullptr,
      .low_latency = nullptr,
      .load = nullptr,
      .upload = nullptr,
      .download = nullptr,
      .use = nullptr,
      .identity = nullptr,
      .share = nullptr,
      .open = nullptr,
      .close = nullptr,
      .reach = nullptr,
      .allocate = allocate,
      .release = release,
      .allocate_mapped = nullptr,
      .release_mapped = nullptr,
      .create_stream = [](void** stream) { return *stream = machine->add_stream(), 0; },
      .destroy_stream = [](void*) { return 0; },
      .create_event = [](void** event) { return *event = new FakeEvent, 0; },
      .destroy_event = [](void* event) { return delete static_cast<FakeEvent*>(event), 0; },
      .record = record,
      .wait = wait,
      .finished = finished,
      .capturing = nullptr,
      .explain = [](int) { return "said by the fake device"; },
  };
  return table;
}

FakeStream* FakeMachine::add_stream() {
  streams_.push_back(std::make_unique<FakeStream>(FakeStream{rank, {}}));
  return streams_.back().get();
}

void FakeMachine::violate(const std::string& what) {
  violations.push_back("rank " + std::to_string(rank) + ": " + what);
}

void FakeMachine::add_part(FakeCommunicator* communicator, Part part, FakeStream* stream) {
  if (open_groups == 0) return violate("a message outside a group");
  if (part.bytes == 0) violate("an empty message");
  if (part.peer < 0 || part.peer >= communicator->world || part.peer == communicator->rank) violate("no such peer");
  open_communicator_ = communicator;
  std::shared_ptr<FakeGroup>& group = open_[stream];
  if (!group) group = std::make_shared<FakeGroup>(FakeGroup{communicator->rank, false, 0, {}});
  for (const Part& other : group->parts) {
    if ((!part.sends || !other.sends) && overlap(part, other)) violate("messages of one group overlap");
  }
  if (part.sends) {
    messages.push_back(std::to_string(group->rank) + ">" + std::to_string(part.peer) + " " +
                       std::to_string(part.bytes));
  }
  group->parts.push_back(std::move(part));
  ++group->left;
}

int FakeMachine::close_group() {
  if (open_groups == 0) return violate("a group's end without its start"), kInvalidUsage;
  if (--open_groups > 0) return kNcclSuccess;
  if (open_.empty()) return violate("an empty group"), kNcclSuccess;
  const FakeCommunicator& communicator = *open_communicator_;
  for (auto& [stream, group] : open_) stream->items.push_back({.group = group});
  open_.clear();
  return connect(communicator);
}

int FakeMachine::connect(const FakeCommunicator& communicator) const {
  communicator.inside = true;
  while (!connects && !communicator.ended) std::this_thread::sleep_for(std::chrono::microseconds(100));
  communicator.inside = false;
  return communicator.ended ? kInvalidUsage : kNcclSuccess;
}

bool FakeMachine::can_run(const FakeStream& stream) const {
  if (stream.items.empty()) return false;
  const FakeStream::Item& head = stream.items.front();
  if (head.waits) return *head.waits;
  return !head.group || !head.group->posted || head.group->left == 0;
}

void FakeMachine::post(const std::shared_ptr<FakeGroup>& group) {
  group->posted = true;
  for (Part part : group->parts) {
    part.group = group;
    auto& which = p2p_[part.sends ? std::pair(group->rank, part.peer) : std::pair(part.peer, group->rank)];
    (part.sends ? which.first : which.second).push_back(part);
  }
}

void FakeMachine::run_head(FakeStream& stream) {
  const FakeStream::Item head = stream.items.front();
  if (head.group && !head.group->posted) return post(head.group);
  stream.items.pop_front();
  if (head.sets) *head.sets = true;
  if (!head.act) return;
  head.act();
  overlaps += std::any_of(streams_.begin(), streams_.end(), [&](const auto& other) {
    if (other->rank != stream.rank || other->items.empty()) return false;
    const auto& group = other->items.front().group;
    return group != nullptr && group->posted;
  });
}

void FakeMachine::move(int from, int to) {
  auto& [sends, receives] = p2p_[{from, to}];
  const Part out = sends.front(), in = receives.front();
  sends.pop_front();
  receives.pop_front();
  if (out.bytes != in.bytes) {
    violate("rank " + std::to_string(from) + " sends " + std::to_string(out.bytes) + " bytes to rank " +
            std::to_string(to) + ", which receives " + std::to_string(in.bytes));
  }
  std::memcpy(in.address, out.address, std::min(in.bytes, out.bytes));
  --out.group->left;
  --in.group->left;
}

bool FakeMachine::step(std::mt19937& random) {
  std::vector<std::function<void()>> able;
  for (auto& stream : streams_) {
    if (can_run(*stream)) able.push_back([&] { run_head(*stream); });
  }
  for (auto& which : p2p_) {
    if (which.second.first.empty() || which.second.second.empty()) continue;
    able.push_back([this, key = which.first] { move(key.first, key.second); });
  }
  if (able.empty()) return false;
  able[random() % able.size()]();
  return true;
}

bool FakeMachine::execute(unsigned seed) {
  std::mt19937 random(seed);
  while (step(random)) {
  }
  return std::all_of(streams_.begin(), streams_.end(), [](const auto& stream) { return stream->items.empty(); });
}
