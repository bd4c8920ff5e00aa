// What a GPU can show that no host test can, and how fast it is; `make gpu-check` runs it. Ranks are virtual: one
// process, one stream each, all on device 0. One GPU cannot show what lies between GPUs: neither bandwidth nor a fence
// that is missing.
//
//   gpu_check [smoke | kernels | bandwidth | pull | pull-speed | nccl | nccl-speed] [--few] [--together]
//
// --few is for a sanitizer or a device that is none; --together puts all ranks of `pull` into one launch, for tools that
// run one kernel at a time. Without a mode all run, one after another; `make gpu-check` runs each in a process of its own,
// so that what ends one of them, or the device's context, ends no other.
// Prints a line per result, "name<TAB>figure<TAB>unit", and ends with 1 where a result was wrong or missing, with 2
// where there is no GPU.
#include <cstdlib>
#include <cstring>

#include "gpu/gpu.h"
#include "section.h"

using namespace gpu_check;

namespace {

constexpr int kNoGpu = 2;

struct Mode {
  const char* name;
  void (*run)(const Options& options);
};
constexpr Mode kModes[] = {{"smoke", smoke},           {"kernels", kernels}, {"bandwidth", bandwidth},  {"pull", pull},
                           {"pull-speed", pull_speed}, {"nccl", nccl},       {"nccl-speed", nccl_speed}};

/// Before anything opens the device. Virtual ranks need a hardware queue each, and no kernel loaded while another waits
/// for it; under a sanitizer loading them all takes too long. Ranks share the device, which NCCL must be told. One thread
/// launches all graphs, which can hang with NCCL's nodes for mixing them with other calls.
void set_environment(const Options& options) {
  ::setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
  if (!options.few) ::setenv("CUDA_MODULE_LOADING", "EAGER", 0);
  ::setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1", 0);
  ::setenv("NCCL_NVLS_ENABLE", "0", 0);
  ::setenv("NCCL_GRAPH_MIXING_SUPPORT", "0", 0);
}

int run(const Mode* chosen, const Options& options) {
  const ringlet::GpuStatus status = ringlet::gpu_status();
  say("device\t" + status.detail + "\t" + status.state);
  say("cuda\truntime " + std::to_string(status.runtime_version) + ", driver " + std::to_string(status.driver_version));
  if (status.state != "ready") {
    std::fprintf(stderr, "gpu_check: %s: %s; %s\n", status.state.c_str(), status.detail.c_str(), status.advice.c_str());
    return kNoGpu;
  }
  for (const Mode& mode : kModes) {
    if (chosen != nullptr && chosen != &mode) continue;
    if (device_hangs) break;
    if (chosen == nullptr) say(std::string("-- ") + mode.name);
    attempt(mode.name, [&] { mode.run(options); });
  }
  const int result = check_result("gpu_check");
  std::fflush(stdout);
  // Threads and kernels that do not end would keep destructors waiting.
  if (device_hangs) std::_Exit(result);
  return result;
}

}  // namespace

int main(int arguments, char** words) {
  Options options;
  const Mode* chosen = nullptr;
  for (int i = 1; i < arguments; ++i) {
    const Mode* found = nullptr;
    for (const Mode& mode : kModes) found = std::strcmp(words[i], mode.name) == 0 ? &mode : found;
    const bool few = std::strcmp(words[i], "--few") == 0, together = std::strcmp(words[i], "--together") == 0;
    if (!few && !together && (found == nullptr || chosen != nullptr)) {
      std::fprintf(stderr, "usage: gpu_check [MODE] [--few] [--together]; modes:");
      for (const Mode& mode : kModes) std::fprintf(stderr, " %s", mode.name);
      std::fprintf(stderr, "\n");
      return 1;
    }
    options.few = options.few || few;
    options.together = options.together || together;
    chosen = few || together ? chosen : found;
  }
  set_environment(options);
  return run(chosen, options);
}
