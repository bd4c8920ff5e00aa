#include "nccl_ranks.h"

#include <algorithm>
#include <cstdlib>
#include <future>
#include <memory>
#include <string_view>
#include <thread>

#include "device_memory.h"

namespace gpu_check {
namespace {

constexpr std::chrono::seconds kBeginning{30}, kEnding{10};
constexpr int kFloat = 7, kSum = 0;  // of ncclDataType_t and ncclRedOp_t

void take(const NcclApi& api, int result) {
  if (result == kNcclSuccess || result == kNcclInProgress) return;
  throw DeviceError(std::string("NCCL: ") + api.get_error_string(result) + "; NCCL_DEBUG=WARN makes NCCL say more");
}

std::vector<NcclComm> communicators(const NcclApi& api, size_t world, int ctas) {
  std::vector<NcclComm> comms(world);
  std::vector<NcclConfig> configs(world);
  NcclUniqueId id{};
  ok(device().use(0), "taking the device");
  take(api, api.get_unique_id(&id));
  take(api, api.group_start());
  for (size_t q = 0; q < world; ++q) {
    configs[q].blocking = 1;
    configs[q].max_ctas = ctas;
    take(api, api.comm_init_rank_config(&comms[q], static_cast<int>(world), id, static_cast<int>(q), &configs[q]));
  }
  take(api, api.group_end());
  for (int state = kNcclInProgress; NcclComm comm : comms) {
    while (state = kNcclSuccess, take(api, api.comm_get_async_error(comm, &state)), state == kNcclInProgress) {
      std::this_thread::yield();
    }
    take(api, state);
  }
  return comms;
}

}  // namespace

void within(std::chrono::seconds limit, const std::string& what, std::function<void()> act) {
  std::packaged_task<void()> task(std::move(act));
  std::future<void> done = task.get_future();
  std::thread(std::move(task)).detach();
  if (done.wait_for(limit) != std::future_status::ready) {
    device_hangs = true;
    throw Timeout(what + " was not done after " + in_seconds(limit) + "; the device is left alone from here on");
  }
  done.get();
}

int most_ctas(int world) {
  if (const char* given = std::getenv("NCCL_MAX_CTAS"); given != nullptr && std::atoi(given) > 0)
    return std::atoi(given);
  RingletCudaIdentity identity{};
  ok(device().identity(&identity), "asking for the device");
  return std::clamp(identity.processors * 3 / 4 / world, 1, 16);
}

std::unique_ptr<NcclRanks> NcclRanks::make(int world) {
  const std::string ranks = "NCCL, " + std::to_string(world) + " virtual ranks";
  try {
    auto made = std::make_unique<NcclRanks>(world);
    tell(ranks, most_ctas(world), "processors a rank at most");
    return made;
  } catch (const DeviceError& error) {
    const char* named = std::getenv("RINGLET_NCCL_LIBRARY");
    if (named != nullptr && std::string_view(named) != "/nonexistent") throw;
    say(ranks + ": not to be had: " + error.what());
    return nullptr;
  }
}

NcclRanks::NcclRanks(int world) : api_(nccl_api()) {
  const auto made = std::make_shared<std::vector<NcclComm>>();
  within(kBeginning, "making NCCL's communicators", [made, &api = api_, world, ctas = most_ctas(world)] {
    *made = communicators(api, static_cast<size_t>(world), ctas);
  });
  comms_ = *made;
}

NcclRanks::~NcclRanks() {
  try {
    within(kEnding, "ending NCCL's communicators", [&api = api_, comms = comms_] {
      for (NcclComm comm : comms) api.comm_abort(comm);
    });
  } catch (const std::exception& error) {
    say(error.what());
  }
}

void NcclRanks::as_one(const std::function<void(const NcclApi&, const Take&)>& act) const {
  take(api_, api_.group_start());
  int refused = kNcclSuccess;  // the group is ended in any case: NCCL counts those that a thread has open
  act(api_, [&](int result) {
    if (refused == kNcclSuccess && result != kNcclInProgress) refused = result;
  });
  const int ended = api_.group_end();
  take(api_, refused == kNcclSuccess ? ended : refused);
}

void NcclRanks::sum_of_floats(const std::vector<Buffers>& ranks, size_t count) const {
  as_one([&](const NcclApi& api, const Take& take) {
    for (size_t q = 0; q < comms_.size(); ++q) {
      take(api.all_reduce(ranks[q].input, ranks[q].output, count, kFloat, kSum, comms_[q], ranks[q].stream));
    }
  });
}

}  // namespace gpu_check
