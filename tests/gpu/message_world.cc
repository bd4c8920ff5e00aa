#include "message_world.h"

#include "nccl_ranks.h"

namespace gpu_check {
namespace {

constexpr std::chrono::seconds kRendezvous{30};
constexpr std::chrono::seconds kThread{40};  // for a rank's thread: longer than anything that it waits for
constexpr std::chrono::seconds kEnding{10};  // for streams, when NCCL is aborted

void take_device() { device().use(0); }

}  // namespace

MessageWorld::MessageWorld(int world, const Options& options)
    : timeout_(options.few ? 30 : 10),
      together_(nccl_api(), world, take_device),
      connecting_(static_cast<size_t>(2 * world * world)) {
  for (int q = 0; q < world; ++q) ranks_.push_back(std::make_unique<Rank>());
}

void MessageWorld::start(const GpuMessageExecutor::Limits& limits) {
  const NcclUniqueId id = NcclCommunicator::make_id(nccl_api());
  std::string wrong = on_all([&](Rank&, int rank) { join(rank, id, limits); });
  if (wrong.empty()) wrong = connect();
  if (wrong.empty()) wrong = wait();
  if (!wrong.empty()) throw DeviceError("making a world of NCCL's ranks: " + wrong);
}

void MessageWorld::join(int rank, const NcclUniqueId& id, const GpuMessageExecutor::Limits& limits) {
  const auto world = static_cast<int>(ranks_.size());
  Rank& one = *ranks_[static_cast<size_t>(rank)];
  const NcclCommunicator::Setup setup{.id = id, .rank = rank, .world = world, .max_ctas = most_ctas(world)};
  one.communicator = std::make_unique<NcclCommunicator>(together_.api(), setup, Deadline::after(kRendezvous));
  one.engine = std::make_unique<GpuMessageExecutor>(*one.communicator, device(), limits);
  one.nccls_own = std::make_unique<NcclCollectives>(*one.communicator);
}

/// Every pair in one group: later groups need not be of the same round on all ranks.
std::string MessageWorld::connect() {
  return in_call([this](Rank& one, int rank) {
    const auto world = static_cast<int>(ranks_.size());
    one.communicator->open_group();
    for (int peer = 0; peer < world; ++peer) {
      if (peer == rank) continue;
      std::byte* own = connecting_.data() + 2 * (rank * world + peer);
      one.communicator->send(own, 1, peer, one.stream.get());
      one.communicator->recv(own + 1, 1, peer, one.stream.get());
    }
    one.communicator->close_group(Deadline::after(timeout_));
  });
}

/// By each rank's thread; what they threw.
std::string MessageWorld::on_all(const std::function<void(Rank&, int)>& act) {
  for (size_t q = 0; q < ranks_.size(); ++q) {
    ranks_[q]->thread.begin([act, &rank = *ranks_[q], q] {
      take_device();
      act(rank, static_cast<int>(q));
    });
  }
  std::string all;
  for (size_t q = 0; q < ranks_.size(); ++q) {
    const std::string wrong = ranks_[q]->thread.end(kThread);
    if (!wrong.empty()) all += (all.empty() ? "rank " : "; rank ") + std::to_string(q) + ": " + wrong;
  }
  return all;
}

/// What closes groups: nobody waits for the group of a rank that has come to its end, or failed.
std::string MessageWorld::in_call(const std::function<void(Rank&, int)>& act) {
  together_.enter();
  return on_all([this, act](Rank& one, int rank) {
    const std::shared_ptr<void> left(nullptr, [this](void*) { together_.leave(); });
    act(one, rank);
  });
}

void MessageWorld::place(const Case& c, const Expectation& expectation) {
  for (size_t q = 0; q < ranks_.size(); ++q) {
    const auto rank = static_cast<int>(q);
    ranks_[q]->call = ranks_[q]->tensors.place(c, rank, expectation.input(rank));
    ranks_[q]->call.timeout = timeout_;
  }
}

std::string MessageWorld::launch(int times) {
  return in_call([times](Rank& rank, int) {
    for (int i = 0; i < times; ++i) rank.engine->run(rank.call, rank.stream.get());
  });
}

std::string MessageWorld::launch_nccls_own(int times) {
  return in_call([times](Rank& rank, int) {
    Call call = rank.call;
    call.algorithm = nccls_own(call.collective);
    for (int i = 0; i < times; ++i) rank.nccls_own->run(call, rank.stream.get());
  });
}

std::string MessageWorld::hand_over(int times) {
  const std::string wrong = in_call([this, times](Rank& one, int rank) {
    const auto world = static_cast<int>(ranks_.size());
    const int next = (rank + 1) % world, before = (rank + world - 1) % world;
    for (int i = 0; i < times; ++i) {
      one.communicator->open_group();
      one.communicator->send(connecting_.data() + 2 * (rank * world + next), 1, next, one.stream.get());
      one.communicator->recv(connecting_.data() + 2 * (rank * world + before) + 1, 1, before, one.stream.get());
      one.communicator->close_group(Deadline::after(timeout_));
    }
  });
  return wrong.empty() ? wait() : wrong;
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

std::string MessageWorld::difference(const Expectation& expectation) {
  std::string all;
  for (size_t q = 0; q < ranks_.size(); ++q) {
    const std::string wrong = ranks_[q]->tensors.difference(expectation.output(static_cast<int>(q)));
    if (!wrong.empty()) all += (all.empty() ? "rank " : "; rank ") + std::to_string(q) + ": " + wrong;
  }
  return all;
}

std::string MessageWorld::run(const Case& c, const Expectation& expectation) {
  place(c, expectation);
  const std::string failed = launch(1);
  const std::string late = device_hangs ? "" : wait();
  if (!failed.empty() || !late.empty()) return failed + (failed.empty() ? "" : "; ") + late;
  for (auto& rank : ranks_) rank->communicator->check();
  return difference(expectation);
}

/// Their kernels end when NCCL is aborted on all ranks; where they do not, nothing can come after.
void MessageWorld::end_failed() {
  if (!together_.abort_all()) device_hangs = true;
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
