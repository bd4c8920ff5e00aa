#include "replay.h"

#include <dlfcn.h>

#include <cstring>
#include <string>
#include <utility>

#include "device_memory.h"

namespace gpu_check {
namespace {

constexpr int kRelaxed = 2;  // of CUstreamCaptureMode: NCCL may allocate meanwhile

/// Of CUDA's driver, which the CUDA library has opened; its own runtime is nobody else's to call.
struct Driver {
  int (*begin)(void* stream, int mode) = nullptr;
  int (*end)(void* stream, void** graph) = nullptr;
  int (*instantiate)(void** executable, void* graph, unsigned long long flags) = nullptr;
  int (*upload)(void* executable, void* stream) = nullptr;
  int (*launch)(void* executable, void* stream) = nullptr;
  int (*destroy)(void* executable) = nullptr;
  int (*destroy_graph)(void* graph) = nullptr;
};

const Driver& driver() {
  static const Driver found = [] {
    Driver driver;
    void* library = ::dlopen("libcuda.so.1", RTLD_NOW);
    const auto get = [&](const char* name, auto& function) {
      void* const symbol = library == nullptr ? nullptr : ::dlsym(library, name);
      if (symbol == nullptr) throw DeviceError(std::string("CUDA's driver has no ") + name);
      std::memcpy(&function, &symbol, sizeof symbol);
    };
    get("cuStreamBeginCapture_v2", driver.begin);
    get("cuStreamEndCapture", driver.end);
    get("cuGraphInstantiateWithFlags", driver.instantiate);
    get("cuGraphUpload", driver.upload);
    get("cuGraphLaunch", driver.launch);
    get("cuGraphExecDestroy", driver.destroy);
    get("cuGraphDestroy", driver.destroy_graph);
    return driver;
  }();
  return found;
}

void take(int code, const char* what) {
  if (code != 0) throw DeviceError(std::string(what) + ": CUDA's driver refused it with " + std::to_string(code));
}

}  // namespace

Replay::Replay(std::vector<void*> streams, int calls, std::function<void()> call)
    : streams_(std::move(streams)), calls_(calls), call_(std::move(call)) {
  if (std::strcmp(device().serves, "cuda") == 0) capture();
}

void Replay::capture() {
  for (void* stream : streams_) take(driver().begin(stream, kRelaxed), "beginning a capture");
  std::string refused;
  try {
    for (int i = 0; i < calls_; ++i) call_();
  } catch (const Error& error) {
    refused = error.what();
  }
  // In any case: a stream that is still captured serves nothing else.
  for (void* stream : streams_) {
    void *graph = nullptr, *executable = nullptr;
    int code = driver().end(stream, &graph);
    if (code == 0 && refused.empty()) code = driver().instantiate(&executable, graph, 0);
    if (code != 0 && refused.empty()) refused = "making a graph: CUDA's driver refused it with " + std::to_string(code);
    if (graph != nullptr) driver().destroy_graph(graph);
    if (executable != nullptr) graphs_.push_back(executable);
    // Now: at its first launch it could wait for kernels of other ranks, which wait for this one's.
    if (executable != nullptr && refused.empty() && driver().upload(executable, stream) != 0)
      refused = "uploading a graph";
  }
  if (refused.empty()) return;
  for (void* executable : graphs_) driver().destroy(executable);
  throw DeviceError(refused);
}

Replay::~Replay() {
  if (device_hangs) return;
  for (void* executable : graphs_) driver().destroy(executable);
}

void Replay::launch() {
  for (size_t i = 0; i < graphs_.size(); ++i) take(driver().launch(graphs_[i], streams_[i]), "launching a graph");
  for (int i = 0; graphs_.empty() && i < calls_; ++i) call_();
}

}  // namespace gpu_check
