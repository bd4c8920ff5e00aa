// A rank of the message engine on the fakes of recording_nccl.h.
#pragma once

#include <algorithm>
#include <cstdio>
#include <initializer_list>
#include <memory>
#include <optional>
#include <string>

#include "collective_cases.h"
#include "gpu/gpu_message_executor.h"
#include "recording_nccl.h"

namespace fake_rank {

using namespace ringlet;
using namespace collective_cases;

/// One rank's tensors and everything that serves it.
struct Rank {
  Rank(FakeMachine& machine, const Case& c, int rank) : tensors(c, rank), call(tensors.call) {
    machine.rank = rank;
    const NcclCommunicator::Setup setup{.rank = rank, .world = c.world};
    communicator =
        std::make_unique<NcclCommunicator>(FakeMachine::nccl(), setup, Deadline::after(std::chrono::seconds(60)));
    engine = std::make_unique<GpuMessageExecutor>(
        *communicator, FakeMachine::device(),
        GpuMessageExecutor::Limits{c.scratch_bytes, /*least=*/1024, size_t{1} << 20});
    stream = machine.add_stream();
  }

  /// As a program does: its stream makes the input, then the call, then reads the output and writes over the input.
  void enqueue_call() {
    stream->items.push_back({.act = [this] { tensors.write_input(); }});
    engine->run(call, stream);
    stream->items.push_back({.act = [this] {
      tensors.read_output();
      tensors.spoil_input();
    }});
  }

  Tensors tensors;
  Call& call;
  std::unique_ptr<NcclCommunicator> communicator;
  std::unique_ptr<GpuMessageExecutor> engine;
  FakeStream* stream = nullptr;
};

inline Case small_case() { return {find_algorithm(Collective::all_reduce, "ring"), 2, 1000}; }

}  // namespace fake_rank
