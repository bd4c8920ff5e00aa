#include "comm/gpu_group.h"

#include <algorithm>
#include <cstring>

#include "comm/communicator.h"
#include "engine/gpu.h"

namespace ringlet {
namespace {

constexpr std::chrono::milliseconds kGlance{1};  // between two looks at what is pending
constexpr std::chrono::seconds kFarewell{2};

/// What a rank tells the others before anything is made.
struct Card {
  NcclUniqueId id{};  // of rank 0: the group's
  char lacking[512]{};
};

}  // namespace

GpuGroup::Parts GpuGroup::parts() {
  Parts parts;
  try {
    parts.device = &gpu_device();
    parts.nccl = &nccl_api();
  } catch (const Error& error) {
    parts.lacking = error.what();
  }
  return parts;
}

GpuGroup::GpuGroup(Communicator& host, const Parts& parts) : host_(host), parts_(parts) {
  std::string lacking = parts_.lacking;
  NcclUniqueId id{};
  try {
    if (lacking.empty() && host_.rank() == 0) id = NcclCommunicator::make_id(*parts_.nccl);
  } catch (const Error& error) {
    lacking = error.what();
  }
  agree(lacking, &id);
  try {
    const NcclCommunicator::Setup setup{.id = id, .rank = host_.rank(), .world = host_.world()};
    communicator_ = std::make_unique<NcclCommunicator>(*parts_.nccl, setup, Deadline::after(host_.timeout()));
    engine_ = std::make_unique<GpuMessageEngine>(*communicator_, *parts_.device, GpuMessageEngine::Limits{});
  } catch (const Error& error) {
    lacking = error.what();
  }
  agree(lacking, nullptr);
  watch_ = std::thread([this] { watch(); });
}

GpuGroup::~GpuGroup() {
  {
    std::unique_lock lock(mutex_);
    stop_ = true;
    changed_.notify_all();
    changed_.wait_for(lock, kFarewell, [this] { return pending_.empty(); });
    if (!pending_.empty())
      communicator_->abort(ErrorKind::invalid_usage, "the group was closed before this call was done");
  }
  watch_.join();
  for (void* event : events_) parts_.device->destroy_event(event);
}

/// Every rank learns what every rank lacks; throws where any does. Rank 0's id is all's.
void GpuGroup::agree(const std::string& lacking, NcclUniqueId* id) {
  Card mine;
  if (id != nullptr) mine.id = *id;
  lacking.copy(mine.lacking, sizeof mine.lacking - 1);
  std::vector<Card> all(static_cast<size_t>(host_.world()));
  Call call;
  call.collective = Collective::all_gather;
  call.count = sizeof(Card);
  call.input = reinterpret_cast<const std::byte*>(&mine);
  call.output = reinterpret_cast<std::byte*>(all.data());
  host_.run(call);
  std::string refusal;
  for (size_t q = 0; q < all.size(); ++q) {
    if (all[q].lacking[0] != '\0') refusal += "; rank " + std::to_string(q) + ": " + all[q].lacking;
  }
  if (!refusal.empty()) {
    throw DeviceError("rank " + std::to_string(host_.rank()) + " of " + std::to_string(host_.world()) +
                      ": no collectives on the GPU" + refusal);
  }
  if (id != nullptr) *id = all[0].id;
}

std::shared_ptr<Work> GpuGroup::run(Call call, void* stream) {
  host_.check(call);
  if (call.timeout.count() <= 0) call.timeout = host_.timeout();
  auto work = std::make_shared<Work>();
  {
    const std::lock_guard lock(mutex_);
    call.sequence = sequence_;
    int captured = 0;
    device_call(parts_.device->capturing(stream, &captured), "asking whether a stream is captured");
    enqueue(call, stream);
    ++sequence_;
    if (captured == 0) {
      void* done = event();
      device_call(parts_.device->record(done, stream), "recording an event");
      pending_.push_back({done, Deadline::after(call.timeout), engine_->last_call(), work});
      changed_.notify_all();
      return work;
    }
  }
  work->complete(nullptr);
  return work;
}

/// What is refused leaves all as it was; what fails later ends the group.
void GpuGroup::enqueue(const Call& call, void* stream) {
  try {
    engine_->run(call, stream);
  } catch (const InvalidUsage&) {
    throw;
  } catch (const Error& error) {
    host_.poison(error);
    throw;
  }
}

void GpuGroup::abort(const std::string& reason) {
  const std::lock_guard lock(mutex_);
  communicator_->abort(ErrorKind::peer_lost, reason);
}

void* GpuGroup::event() {
  if (events_.empty()) {
    void* made = nullptr;
    device_call(parts_.device->create_event(&made), "making an event");
    return made;
  }
  void* free = events_.back();
  events_.pop_back();
  return free;
}

void GpuGroup::watch() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return stop_ || !pending_.empty(); });
    if (pending_.empty()) return;
    Ended ended;
    look(ended);
    if (pending_.empty()) changed_.notify_all();
    if (ended.empty()) {
      changed_.wait_for(lock, kGlance);
      continue;
    }
    lock.unlock();  // what runs when a call is complete may make the next
    for (auto& [work, error] : ended) work->complete(error);
    lock.lock();
  }
}

void GpuGroup::look(Ended& ended) {
  try {
    const size_t through = finished();
    communicator_->check();  // after, since an abort ends what is under way, and then it looks finished
    host_.raise_if_failed();
    for (size_t i = 0; i < through; ++i) {
      events_.push_back(pending_.front().event);
      ended.emplace_back(std::move(pending_.front().work), nullptr);
      pending_.pop_front();
    }
    if (pending_.empty() || !pending_.front().deadline.passed()) return;
    throw Timeout(
        pending_.front().what + " on rank " + std::to_string(host_.rank()) + " of " + std::to_string(host_.world()) +
        " was not done at the deadline; some rank has not made this call, made another, or is stuck before it");
  } catch (const Error& error) {
    communicator_->abort(error.kind(), error.what());
    host_.poison(error);
    for (Pending& call : pending_) {
      events_.push_back(call.event);
      ended.emplace_back(std::move(call.work), std::current_exception());
    }
    pending_.clear();
  }
}

/// How many of the pending calls the device is through with, from the first.
size_t GpuGroup::finished() const {
  size_t through = 0;
  for (const Pending& call : pending_) {
    int answer = 0;
    device_call(parts_.device->finished(call.event, &answer), call.what.c_str());
    if (answer == 0) break;
    ++through;
  }
  return through;
}

void GpuGroup::device_call(int code, const char* what) const {
  if (code != 0) throw DeviceError(std::string(what) + ": " + parts_.device->explain(code));
}

}  // namespace ringlet
