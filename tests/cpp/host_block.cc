// The kernels of the GPU on the host's blocks: every dtype and operation.
#include "host_block.h"

#include "cuda/table.h"

namespace host_block {
namespace {

struct RunPull {
  using Function = PullRun;
  template <class E, class Ops>
  static Function get() {
    return [](const cuda::PullArgs& args, int index) {
      HostBlock block(index);
      cuda::PullInterpreter<E, Ops, HostBlock>(args, block).run();
    };
  }
};

template <class E>
void run_low_latency(const cuda::LowArgs& args, int index) {
  HostBlock block(index);
  cuda::LowInterpreter<E, cuda::Sums, HostBlock>(args, block).run();
}

}  // namespace

PullRun find_pull(DType dtype, ReduceOp op) {
  if (const auto run = cuda::find_float<RunPull>(dtype, op)) return run;
  if (const auto run = cuda::find_float8<RunPull>(dtype, op)) return run;
  return cuda::find_other<RunPull>(dtype, op);
}

LowRun find_low_latency(DType dtype) {
  if (dtype == DType::float32) return run_low_latency<cuda::Float32>;
  return dtype == DType::float16 ? run_low_latency<cuda::Float16> : run_low_latency<cuda::BFloat16>;
}

void run_exchange(const cuda::ExchangeArgs& args, int index) {
  HostBlock block(index);
  cuda::ExchangeInterpreter<HostBlock>(args, block).run();
}

}  // namespace host_block
