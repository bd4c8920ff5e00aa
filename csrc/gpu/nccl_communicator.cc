#include "gpu/nccl_communicator.h"

#include <future>
#include <system_error>
#include <thread>

#include "base/runtime.h"

namespace ringlet {
namespace {

// NCCL's own threads do the work meanwhile: a launch takes microseconds, meeting the other ranks much longer.
constexpr int kQuickTries = 1000;
constexpr std::chrono::microseconds kPause{20};
// A communicator that does not end by itself in this time is aborted, and an abort that takes this long is left alone.
constexpr std::chrono::seconds kGoodbye{2}, kLastWait{1};
constexpr std::chrono::milliseconds kLookEvery{20};

/// On a thread of its own, which is not waited for any longer than that.
template <class Act>
void within(std::chrono::seconds limit, const std::function<void()>& enter, const Act& act) noexcept {
  try {
    std::packaged_task<void()> task([enter, act] {
      if (enter) enter();
      act();
    });
    const std::future<void> done = task.get_future();
    std::thread(std::move(task)).detach();
    done.wait_for(limit);
  } catch (const std::system_error&) {  // no thread to be had: then NCCL keeps what it has
  }
}

/// `api`: a copy, since the one given may be gone before NCCL is.
void end(const NcclApi& api, NcclComm comm) {
  const Deadline deadline = Deadline::after(kGoodbye);
  int state = api.comm_finalize(comm);
  while (state == kNcclInProgress && !deadline.passed()) {
    std::this_thread::sleep_for(kPause);
    if (api.comm_get_async_error(comm, &state) != kNcclSuccess) break;
  }
  state == kNcclSuccess ? api.comm_destroy(comm) : api.comm_abort(comm);
}

}  // namespace

NcclUniqueId NcclCommunicator::make_id(const NcclApi& api) {
  NcclUniqueId id{};
  if (const int result = api.get_unique_id(&id); result != kNcclSuccess) {
    throw DeviceError(std::string("ncclGetUniqueId: ") + api.get_error_string(result));
  }
  return id;
}

NcclCommunicator::NcclCommunicator(const NcclApi& api, const Setup& setup, const Deadline& deadline)
    : api_(api), rank_(setup.rank), world_(setup.world), look_(setup.look), enter_(setup.enter) {
  NcclConfig config;
  config.max_ctas = setup.max_ctas;
  take(api_.comm_init_rank_config(&comm_, world_, setup.id, rank_, &config), "ncclCommInitRankConfig");
  settle("ncclCommInitRankConfig", deadline);
}

NcclCommunicator::~NcclCommunicator() {
  if (comm_ == nullptr) return;
  within(kGoodbye + kLastWait, enter_, [api = api_, comm = comm_] { end(api, comm); });
}

void NcclCommunicator::open_group() {
  if (!failed_.empty()) rethrow(failed_kind_, failed_);
  take(api_.group_start(), "ncclGroupStart");
  in_group_ = true;
}

void NcclCommunicator::send(const void* from, size_t bytes, int peer, NcclStream stream) {
  take(api_.send(from, bytes, kNcclUint8, peer, comm_, stream), "ncclSend");
}

void NcclCommunicator::recv(void* to, size_t bytes, int peer, NcclStream stream) {
  take(api_.recv(to, bytes, kNcclUint8, peer, comm_, stream), "ncclRecv");
}

void NcclCommunicator::close_group(const Deadline& deadline) {
  in_group_ = false;
  take(api_.group_end(), "ncclGroupEnd");
  settle("ncclGroupEnd", deadline);
}

void NcclCommunicator::check() {
  if (!failed_.empty()) rethrow(failed_kind_, failed_);
  int state = kNcclSuccess;
  take(api_.comm_get_async_error(comm_, &state), "ncclCommGetAsyncError");
  take(state, "a collective under way");
}

void NcclCommunicator::abort() noexcept {
  if (failed_.empty()) failed_ = "the communicator was aborted before";
  if (in_group_) api_.group_end();  // NCCL counts open groups by thread, not by communicator
  in_group_ = false;
  if (comm_ != nullptr) within(kLastWait, enter_, [give_up = api_.comm_abort, comm = comm_] { give_up(comm); });
  comm_ = nullptr;
}

void NcclCommunicator::take(int result, const char* function) {
  if (result == kNcclSuccess || result == kNcclInProgress) return;
  std::string message = std::string(function) + " of rank " + std::to_string(rank_) + " of " + std::to_string(world_) +
                        ": " + api_.get_error_string(result);
  if (const char* last = comm_ == nullptr ? nullptr : api_.get_last_error(comm_); last != nullptr && *last != '\0') {
    message += std::string(" (") + last + ")";
  }
  if (result == kNcclRemoteError) fail(ErrorKind::peer_lost, message + "; see the other ranks' messages");
  fail(ErrorKind::device_error, message + "; NCCL_DEBUG=WARN makes NCCL say more");
}

void NcclCommunicator::settle(const char* function, const Deadline& deadline) {
  Deadline next_look = Deadline::after(kLookEvery);
  for (int tries = 0, state = kNcclInProgress;; ++tries) {
    take(api_.comm_get_async_error(comm_, &state), "ncclCommGetAsyncError");
    take(state, function);
    if (state == kNcclSuccess) return;
    if (deadline.passed()) {
      fail(ErrorKind::timeout, std::string(function) + " of rank " + std::to_string(rank_) + " of " +
                                   std::to_string(world_) +
                                   " was not done at the deadline; some rank has not come, or cannot be reached");
    }
    if (look_ && next_look.passed()) {
      look();
      next_look = Deadline::after(kLookEvery);
    }
    if (tries < kQuickTries) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(kPause);
    }
  }
}

void NcclCommunicator::look() {
  try {
    look_();
  } catch (const Error& error) {
    fail(error.kind(), error.what());
  } catch (const Interrupted& interrupted) {
    abort(ErrorKind::peer_lost, "interrupted (" + interrupted.by + ")");
    throw;
  }
}

void NcclCommunicator::abort(ErrorKind kind, const std::string& reason) noexcept {
  if (failed_.empty()) {
    failed_kind_ = kind;
    failed_ = reason;
  }
  abort();
}

void NcclCommunicator::fail(ErrorKind kind, const std::string& message) {
  abort(kind, message);
  rethrow(kind, message);
}

}  // namespace ringlet
