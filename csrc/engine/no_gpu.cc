// Linked where there was no nvcc; gpu.cc otherwise.
#include "engine/gpu.h"

namespace ringlet {

GpuStatus gpu_status() {
  return {.state = "not built",
          .detail = "this build found no nvcc",
          .advice = "install the CUDA toolkit 11.8 or later, put nvcc on PATH, and build again"};
}

}  // namespace ringlet
