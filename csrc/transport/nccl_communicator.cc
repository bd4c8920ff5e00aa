#include "transport/nccl_communicator.h"

#include <thread>

namespace ringlet {
namespace {

// NCCL's own threads do the work meanwhile: a launch takes microseconds, meeting the other ranks much longer.
constexpr int kQuickTries = 1000;
constexpr std::chrono::microseconds kPause{20};
constexpr std::chrono::seconds kFarewell{10};

}  // namespace

NcclUniqueId NcclCommunicator::make_id(const NcclApi& api) {
  NcclUniqueId id{};
  if (const int result = api.get_unique_id(&id); result != kNcclSuccess) {
    throw DeviceError(std::string("ncclGetUniqueId: ") + api.get_error_string(result));
  }
  return id;
}

NcclCommunicator::NcclCommunicator(const NcclApi& api, const Setup& setup, const Deadline& deadline)
    : api_(api), rank_(setup.rank), world_(setup.world) {
  NcclConfig config;
  config.max_ctas = setup.max_ctas;
  take(api_.comm_init_rank_config(&comm_, world_, setup.id, rank_, &config), "ncclCommInitRankConfig");
  settle("ncclCommInitRankConfig", deadline);
}

NcclCommunicator::~NcclCommunicator() {
  if (comm_ == nullptr) return;
  const Deadline deadline = Deadline::after(kFarewell);
  int state = api_.comm_finalize(comm_);
  while (state == kNcclInProgress && !deadline.passed()) {
    std::this_thread::sleep_for(kPause);
    if (api_.comm_get_async_error(comm_, &state) != kNcclSuccess) break;
  }
  if (state == kNcclSuccess) {
    api_.comm_destroy(comm_);
  } else {
    abort();
  }
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
  if (comm_ != nullptr) api_.comm_abort(comm_);
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
  for (int tries = 0, state = kNcclInProgress;; ++tries) {
    take(api_.comm_get_async_error(comm_, &state), "ncclCommGetAsyncError");
    take(state, function);
    if (state == kNcclSuccess) return;
    if (deadline.passed()) {
      fail(ErrorKind::timeout, std::string(function) + " of rank " + std::to_string(rank_) + " of " +
                                   std::to_string(world_) +
                                   " was not done at the deadline; some rank has not come, or cannot be reached");
    }
    if (tries < kQuickTries) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(kPause);
    }
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
