#include "gpu/nccl_api.h"

#include <dlfcn.h>

#include <cstdlib>
#include <mutex>
#include <optional>

#include "base/error.h"
#include "base/process.h"

namespace ringlet {
namespace {

constexpr const char* kVariable = "RINGLET_NCCL_LIBRARY";
constexpr const char* kName = "libnccl.so.2";

std::string advice() {
  return std::string("; install the nvidia-nccl package of your CUDA version, or name a libnccl.so.2 in ") + kVariable;
}

std::string loader_message() {
  const char* message = ::dlerror();
  return message == nullptr ? "no reason given" : message;
}

template <class Function>
void find(void* library, const std::string& path, const char* name, Function& function) {
  function = reinterpret_cast<Function>(::dlsym(library, name));
  if (function == nullptr) throw DeviceError(path + " has no " + name + ": it is no NCCL, or too old" + advice());
}

std::string dotted(int version) {
  return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

NcclApi table_of(void* library, const std::string& path) {
  NcclApi api;
  api.path = path;
  const auto get = [&](const char* name, auto& function) { find(library, path, name, function); };
  get("ncclGetVersion", api.get_version);
  if (const int refused = api.get_version(&api.version); refused != kNcclSuccess) {
    throw DeviceError(path + ": ncclGetVersion failed with " + std::to_string(refused));
  }
  if (api.version < NcclApi::kOldest) {
    throw DeviceError(path + " is NCCL " + dotted(api.version) + ", and ringlet needs " + dotted(NcclApi::kOldest) +
                      " or later" + advice());
  }
  get("ncclGetUniqueId", api.get_unique_id);
  get("ncclCommInitRankConfig", api.comm_init_rank_config);
  get("ncclCommGetAsyncError", api.comm_get_async_error);
  get("ncclCommFinalize", api.comm_finalize);
  get("ncclCommDestroy", api.comm_destroy);
  get("ncclCommAbort", api.comm_abort);
  get("ncclGroupStart", api.group_start);
  get("ncclGroupEnd", api.group_end);
  get("ncclSend", api.send);
  get("ncclRecv", api.recv);
  get("ncclAllReduce", api.all_reduce);
  get("ncclReduceScatter", api.reduce_scatter);
  get("ncclReduce", api.reduce);
  get("ncclAllGather", api.all_gather);
  get("ncclBroadcast", api.broadcast);
  get("ncclGetErrorString", api.get_error_string);
  get("ncclGetLastError", api.get_last_error);
  return api;
}

}  // namespace

std::string NcclApi::dotted() const { return ringlet::dotted(version); }

std::vector<NcclCandidate> nccl_candidates() {
  if (const char* path = std::getenv(kVariable); path != nullptr && *path != '\0') return {{path}};
  std::vector<NcclCandidate> candidates = {{kName, /*loaded_only=*/true}};
  Dl_info here{};
  if (::dladdr(reinterpret_cast<const void*>(&nccl_candidates), &here) != 0 && here.dli_fname != nullptr) {
    const std::string self = here.dli_fname;
    if (const size_t slash = self.rfind('/'); slash != std::string::npos) {
      candidates.push_back({self.substr(0, slash) + "/../nvidia/nccl/lib/" + kName});
    }
  }
  candidates.push_back({kName});
  return candidates;
}

NcclApi open_nccl(const std::vector<NcclCandidate>& candidates) {
  std::string refusals;
  for (const NcclCandidate& candidate : candidates) {
    // Never closed: NCCL's and the driver's threads may run its code until the process ends.
    const int mode = RTLD_NOW | RTLD_LOCAL | (candidate.loaded_only ? RTLD_NOLOAD : 0);
    if (void* library = ::dlopen(candidate.path.c_str(), mode)) return table_of(library, candidate.path);
    const std::string message = loader_message();
    if (!candidate.loaded_only) refusals += (refusals.empty() ? "" : ", ") + message;
  }
  throw DeviceError("no NCCL: " + refusals + advice());
}

const NcclApi& nccl_api() {
  struct Shared {
    std::mutex mutex;
    std::optional<NcclApi> api;
  };
  static constinit OfProcess<Shared> of_process;
  auto& [mutex, api] = of_process.get();
  const std::lock_guard lock(mutex);
  if (!api) api = open_nccl(nccl_candidates());
  return *api;
}

}  // namespace ringlet
