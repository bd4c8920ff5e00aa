#include "gpu/nccl_communicator.h"

#include <utility>

#include "base/interrupts.h"
#include "base/log.h"

namespace ringlet {
namespace {

// A communicator that does not end by itself in this time is aborted, and an end that takes this long is left alone.
constexpr std::chrono::seconds kGoodbye{2}, kLastWait{1};

}  // namespace

NcclUniqueId NcclCommunicator::make_id(const NcclApi& api) {
  NcclUniqueId id{};
  if (const int result = api.get_unique_id(&id); result != kNcclSuccess) {
    throw DeviceError(std::string("ncclGetUniqueId: ") + api.get_error_string(result));
  }
  return id;
}

NcclCommunicator::NcclCommunicator(const NcclApi& api, const Setup& setup, const Deadline& deadline)
    : held_(std::make_shared<Held>(Held{api})),
      rank_(setup.rank),
      world_(setup.world),
      look_(setup.look),
      thread_(setup.enter) {
  const auto init = [held = held_, id = setup.id, rank = rank_, world = world_, max_ctas = setup.max_ctas] {
    NcclConfig config;
    config.max_ctas = max_ctas;
    return held->api.comm_init_rank_config(&held->comm, world, id, rank, &config);
  };
  launch("ncclCommInitRankConfig", init, deadline);
}

NcclCommunicator::~NcclCommunicator() {
  if (!leave()) return;
  const auto finalize = [held = held_] { return held->api.comm_finalize(held->comm); };
  const auto ended = thread_.run(finalize, Deadline::after(kGoodbye), [] { return false; });
  end(ended == kNcclSuccess ? &NcclApi::comm_destroy : &NcclApi::comm_abort);
}

/// On the thread that makes the calls, behind the one that it is in.
void NcclCommunicator::end(int (*NcclApi::*how)(NcclComm)) noexcept {
  try {
    const auto last = [held = held_, how] {
      if (held->comm != nullptr) (held->api.*how)(held->comm);
    };
    if (thread_.finish(last, kLastWait) || !logging(LogLevel::warning)) return;
  } catch (const std::bad_alloc&) {  // then NCCL keeps what it has
    return;
  }
  log(LogLevel::warning, {rank_, world_},
      "NCCL still works on a call or on the end of a communicator, which stays in memory, and its kernels on the GPU, "
      "until that is over");
}

void NcclCommunicator::open_group() {
  if (failure_.failed()) failure_.raise("");
  parts_.clear();
}

void NcclCommunicator::send(const void* from, size_t bytes, int peer, NcclStream stream) {
  parts_.push_back({true, const_cast<void*>(from), bytes, peer, stream});
}

void NcclCommunicator::recv(void* to, size_t bytes, int peer, NcclStream stream) {
  parts_.push_back({false, to, bytes, peer, stream});
}

void NcclCommunicator::close_group(const Deadline& deadline) {
  if (parts_.empty()) return;
  const auto group = [parts = std::exchange(parts_, {})](const NcclApi& api, NcclComm comm) {
    int result = api.group_start();
    for (const Part& part : parts) {
      if (result != kNcclSuccess) break;
      result = part.sends ? api.send(part.address, part.bytes, kNcclUint8, part.peer, comm, part.stream)
                          : api.recv(part.address, part.bytes, kNcclUint8, part.peer, comm, part.stream);
    }
    const int ended = api.group_end();  // in any case: NCCL counts the groups that a thread has open
    return result == kNcclSuccess ? ended : result;
  };
  call("ncclGroupEnd", group, deadline);
}

void NcclCommunicator::call(const char* function, Act act, const Deadline& deadline) {
  check();
  launch(function, [held = held_, act = std::move(act)] { return act(held->api, held->comm); }, deadline);
}

void NcclCommunicator::launch(const char* function, const std::function<int()>& act, const Deadline& deadline) {
  const std::optional<int> result = thread_.run(act, deadline, [this] { return poll(); });
  if (looked_) std::rethrow_exception(std::exchange(looked_, nullptr));
  if (failure_.failed()) failure_.raise("");  // aborted by another thread, whatever NCCL has returned since
  if (result) return take(*result, function);
  fail(ErrorKind::timeout, std::string(function) + " of rank " + std::to_string(rank_) + " of " +
                               std::to_string(world_) +
                               " was not done at the deadline; some rank has not come, or cannot be reached");
}

void NcclCommunicator::check() {
  if (failure_.failed()) failure_.raise("");
  int state = kNcclSuccess, refused = kNcclSuccess;
  {
    const std::lock_guard lock(mutex_);
    if (!gone_) refused = held_->api.comm_get_async_error(held_->comm, &state);
  }
  take(refused, "ncclCommGetAsyncError");
  take(state, "a collective under way");
}

void NcclCommunicator::abort(ErrorKind kind, const std::string& reason) noexcept {
  failure_.set(kind, reason);
  if (leave()) end(&NcclApi::comm_abort);
}

void NcclCommunicator::take(int result, const char* function) {
  if (result == kNcclSuccess || result == kNcclInProgress) return;
  std::string message = std::string(function) + " of rank " + std::to_string(rank_) + " of " + std::to_string(world_) +
                        ": " + held_->api.get_error_string(result);
  if (const std::string last = last_error(); !last.empty()) message += " (" + last + ")";
  if (result == kNcclRemoteError) fail(ErrorKind::peer_lost, message + "; see the other ranks' messages");
  fail(ErrorKind::device_error, message + "; NCCL_DEBUG=WARN makes NCCL say more");
}

/// The first time true: who gets that ends the communicator.
bool NcclCommunicator::leave() {
  const std::lock_guard lock(mutex_);
  return !std::exchange(gone_, true);
}

std::string NcclCommunicator::last_error() {
  const std::lock_guard lock(mutex_);
  const char* last = gone_ || held_->comm == nullptr ? nullptr : held_->api.get_last_error(held_->comm);
  return last == nullptr ? "" : last;
}

/// True where the call under way is to be given up.
bool NcclCommunicator::poll() {
  if (failure_.failed()) return true;
  if (!look_) return false;
  try {
    look_();
    return false;
  } catch (const Error& error) {
    abort(error.kind(), error.what());
  } catch (const Interrupted& interrupted) {
    abort(ErrorKind::peer_lost, "interrupted (" + interrupted.by + ")");
    looked_ = std::current_exception();
  }
  return true;
}

void NcclCommunicator::fail(ErrorKind kind, const std::string& message) {
  abort(kind, message);
  rethrow(kind, message);
}

}  // namespace ringlet
