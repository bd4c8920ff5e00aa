#include "message_world.h"

namespace gpu_check {
namespace {

constexpr std::chrono::seconds kEnding{10};  // for streams, when NCCL is aborted

// Of the world that is made, and of the rank whose steps are written down.
const NcclRanks* made = nullptr;
std::vector<MessageWorld::Step>* steps = nullptr;

int add(std::function<int()> act) { return steps->push_back({.act = std::move(act)}), 0; }

int add_to_group(std::function<int(const NcclApi&)> transfer) {
  return steps->back().group.push_back(std::move(transfer)), kNcclSuccess;
}

NcclApi recording_nccl(const NcclApi& real) {
  NcclApi api = real;
  api.comm_init_rank_config = [](NcclComm* comm, int, NcclUniqueId, int rank, NcclConfig*) {
    return *comm = made->comms()[static_cast<size_t>(rank)], kNcclSuccess;
  };
  api.comm_finalize = api.comm_destroy = api.comm_abort = [](NcclComm) { return kNcclSuccess; };  // NcclRanks' to end
  api.group_start = [] { return steps->emplace_back(), kNcclSuccess; };
  api.group_end = [] { return kNcclSuccess; };
  api.send = [](const void* from, size_t bytes, int type, int peer, NcclComm comm, NcclStream stream) {
    return add_to_group([=](const NcclApi& nccl) { return nccl.send(from, bytes, type, peer, comm, stream); });
  };
  api.recv = [](void* to, size_t bytes, int type, int peer, NcclComm comm, NcclStream stream) {
    return add_to_group([=](const NcclApi& nccl) { return nccl.recv(to, bytes, type, peer, comm, stream); });
  };
  return api;
}

const RingletCudaDevice& recording_device() {
  static const RingletCudaDevice table = [] {
    RingletCudaDevice made = device();
    made.reduce = [](const ReduceArgs* args, DType dtype, ReduceOp op, void* stream) {
      return add([args = *args, srcs = std::vector(args->srcs, args->srcs + args->n), dtype, op, stream]() mutable {
        args.srcs = srcs.data();
        return device().reduce(&args, dtype, op, stream);
      });
    };
    made.copy = [](void* dst, const void* src, size_t bytes, void* stream) {
      return add([=] { return device().copy(dst, src, bytes, stream); });
    };
    made.record = [](void* event, void* stream) { return add([=] { return device().record(event, stream); }); };
    made.wait = [](void* stream, void* event) { return add([=] { return device().wait(stream, event); }); };
    return made;
  }();
  return table;
}

}  // namespace

MessageWorld::MessageWorld(int world, const Options& options, const GpuMessageExecutor::Limits& limits)
    : timeout_(options.few ? 30 : 10),
      nccl_(std::make_unique<NcclRanks>(world)),
      connecting_(static_cast<size_t>(2 * world * world)) {
  made = nccl_.get();
  const NcclApi api = recording_nccl(nccl_->api());
  for (int q = 0; q < world; ++q) {
    Rank& rank = *ranks_.emplace_back(std::make_unique<Rank>());
    const NcclCommunicator::Setup setup{.rank = q, .world = world};
    rank.communicator = std::make_unique<NcclCommunicator>(api, setup, Deadline::after(timeout_));
    rank.engine = std::make_unique<GpuMessageExecutor>(*rank.communicator, recording_device(), limits);
  }
  connect();
}

void MessageWorld::connect() {
  const auto world = static_cast<int>(ranks_.size());
  for (int q = 0; q < world; ++q) {
    Rank& rank = *ranks_[static_cast<size_t>(q)];
    steps = &rank.steps;
    rank.communicator->open_group();
    for (int peer = 0; peer < world; ++peer) {
      if (peer == q) continue;
      std::byte* own = connecting_.data() + 2 * (q * world + peer);
      rank.communicator->send(own, 1, peer, rank.stream.get());
      rank.communicator->recv(own + 1, 1, peer, rank.stream.get());
    }
    rank.communicator->close_group(Deadline::after(timeout_));
  }
  play();
  if (const std::string late = wait(); !late.empty()) throw DeviceError("connecting NCCL's ranks: " + late);
}

void MessageWorld::record(int times) {
  for (auto& rank : ranks_) {
    rank->steps.clear();
    steps = &rank->steps;
    for (int i = 0; i < times; ++i) rank->engine->run(rank->call, rank->stream.get());
  }
}

void MessageWorld::play() {
  within(timeout_, "launching what the ranks recorded", [this] {
    ok(device().use(0), "taking the device");
    std::vector<size_t> next(ranks_.size());
    for (;;) {
      std::vector<const Step*> groups;
      for (size_t q = 0; q < ranks_.size(); ++q) {
        const std::vector<Step>& todo = ranks_[q]->steps;
        for (; next[q] < todo.size() && todo[next[q]].act; ++next[q]) ok(todo[next[q]].act(), "launching");
        if (next[q] < todo.size()) groups.push_back(&todo[next[q]++]);
      }
      if (groups.empty()) return;
      nccl_->as_one([&](const NcclApi& api, const auto& take) {
        for (const Step* step : groups) {
          for (const auto& transfer : step->group) take(transfer(api));
        }
      });
    }
  });
}

std::string MessageWorld::wait() {
  std::string all;
  const Deadline deadline = Deadline::after(timeout_);
  for (size_t q = 0; q < ranks_.size(); ++q) {
    // A message that does not come keeps a stream until NCCL is aborted, which end_failed() does.
    if (ranks_[q]->stream.done_within(deadline.left())) continue;
    all += "rank " + std::to_string(q) + " has not done its call after " + in_seconds(timeout_) + "; ";
  }
  return all;
}

std::string MessageWorld::run(const Case& c, const Expectation& expectation) {
  place_all(ranks_, c, expectation, timeout_);
  record(1);
  play();
  if (const std::string late = wait(); !late.empty()) return late;
  for (auto& rank : ranks_) rank->communicator->check();
  return difference_of_all(ranks_, expectation);
}

/// Their kernels end when NCCL is aborted on all ranks; where they do not, nothing can come after.
void MessageWorld::end_failed() {
  nccl_.reset();
  try {
    for (auto& rank : ranks_) {
      if (!device_hangs && !rank->stream.done_within(kEnding)) device_hangs = true;
    }
  } catch (const Error& error) {  // what the device refuses now it refuses for ever
    say(error.what());
    device_hangs = true;
  }
}

}  // namespace gpu_check
