#include "gpu/gpu_executors.h"

#include <algorithm>
#include <cstdlib>
#include <utility>

#include "base/environment.h"
#include "base/log.h"
#include "engine/selector.h"
#include "gpu/check_device.h"
#include "gpu/gpu.h"
#include "transport/store.h"

namespace ringlet {
namespace {

constexpr const char* kVariable = "RINGLET_PEER_MEMORY_BYTES";
constexpr const char* kSharedGpus = "NCCL_MULTI_RANK_GPU_ENABLE";  // NCCL's own
constexpr int kMostBlocks = 32;                                    // of a pull kernel
constexpr int kLowLatencyArchitecture = 70;
constexpr std::chrono::seconds kGoodbye{2};
static_assert(cuda::PullLayout{kMostBlocks, cuda::kMostRanks, 0, 0}.staging() <= PeerMemory::kZeroed);

struct Text {
  char text[384]{};

  Text& operator=(const std::string& from) {
    text[from.copy(text, sizeof text - 1)] = '\0';
    return *this;
  }
  bool empty() const { return text[0] == '\0'; }
};

/// Every rank finds the same, without a word from another.
void refuse_several_hosts(const HostGroup& host) {
  const std::vector<int>& hosts = host.host_of_rank();
  const int count = *std::max_element(hosts.begin(), hosts.end()) + 1;
  if (count == 1) return;
  std::string ranks;
  for (int h = 0; h < count; ++h) {
    ranks += (h == 0 ? "ranks " : "; ranks ") + ranks_where(host.world(), [&](int q) { return hosts[q] == h; });
  }
  throw InvalidUsage("rank " + std::to_string(host.rank()) + " of " + std::to_string(host.world()) +
                     " in its first call on a GPU: the group is on " + std::to_string(count) + " hosts (" + ranks +
                     "), and on GPUs ringlet serves one host only: use the nccl backend between hosts "
                     "(init_process_group(\"cpu:ringlet,cuda:nccl\"))");
}

}  // namespace

/// A rank's part of the exchange; plain data.
struct GpuExecutors::Offer {
  NcclUniqueId id{};  // of rank 0
  PeerMemory::Offer memory{};
  size_t peer_bytes = 0;
  int max_ctas = 0, by_table = 0;
  int shared_gpus = 0;  // NCCL is told to let ranks share one
  Text no_device, no_nccl, no_peers;
};

GpuExecutors::Parts GpuExecutors::find(int number) {
  Parts parts;
  parts.number = number;
  try {
    const char* given = std::getenv(kVariable);
    parts.by_table = given == nullptr || *given == '\0' ? 1 : 0;
    parts.peer_bytes = bytes_from_environment(kVariable, /*unit=*/1, /*least=*/0, kPeerBytes);
    parts.device = &gpu_device();
  } catch (const Error& error) {
    parts.no_device = error.what();
  }
  try {
    parts.nccl = &nccl_api();
  } catch (const Error& error) {
    parts.no_nccl = error.what();
  }
  return parts;
}

GpuExecutors::GpuExecutors(HostGroup& host, const Parts& parts) : host_(host), parts_(parts) {
  refuse_several_hosts(host);
  Offer mine = lay_out(parts);
  std::vector<Offer> all = exchange(mine);
  warn_of_one_gpu(all);
  refuse_threads_on_a_gpu(all, mine);
  make(all, mine);
  drop(exchange(mine));
  made_ = true;
}

/// Makes the parts that this rank can make alone, and notes what it lacks.
GpuExecutors::Offer GpuExecutors::lay_out(const Parts& parts) {
  Offer mine;
  mine.peer_bytes = parts.peer_bytes;
  mine.max_ctas = parts.max_ctas;
  mine.by_table = parts.by_table;
  mine.no_device = parts.no_device;
  mine.no_nccl = parts.no_nccl;
  if (const char* shared = std::getenv(kSharedGpus)) mine.shared_gpus = std::atoi(shared) != 0;
  try {
    if (parts.device != nullptr) check_device(*parts.device, parts.device->load(), "loading the kernels");
    if (parts.device != nullptr) mine.memory = PeerMemory::nothing(*parts.device);
  } catch (const Error& error) {
    mine.no_device = error.what();
  }
  try {
    if (parts.nccl != nullptr && host_.rank() == 0) mine.id = NcclCommunicator::make_id(*parts.nccl);
  } catch (const Error& error) {
    mine.no_nccl = error.what();
  }
  if (parts.peer_bytes == 0) {
    mine.no_peers = std::string(kVariable) + " is 0";
  } else if (host_.world() > cuda::kMostRanks) {
    mine.no_peers = "more than " + std::to_string(cuda::kMostRanks) + " ranks";
  } else if (parts.device != nullptr) {
    try {
      memory_ = std::make_unique<PeerMemory>(*parts.device);
      mine.memory = memory_->offer();
    } catch (const Error& error) {
      mine.no_peers = error.what();
    }
  }
  return mine;
}

/// NCCL lets ranks share a GPU if it is told to, but not threads of one process, which it does not refuse.
void GpuExecutors::refuse_threads_on_a_gpu(std::vector<Offer>& all, Offer& mine) const {
  for (size_t q = 0; q < all.size(); ++q) {
    for (size_t r = 0; r < q; ++r) {
      const bool together = all[q].memory.shares_process(all[r].memory) && all[q].memory.shares_device(all[r].memory);
      if (!together || all[q].shared_gpus == 0 || !all[q].no_nccl.empty()) continue;
      all[q].no_nccl = "it is a thread of the process of rank " + std::to_string(r) +
                       " and on the same GPU, where NCCL serves one rank a process, also if " + kSharedGpus +
                       " is set: start each rank as a process";
    }
  }
  mine.no_nccl = all[static_cast<size_t>(host_.rank())].no_nccl;
}

/// Rank 0 says it for all. Ranks that see one GPU each share it on purpose, or have different ones.
void GpuExecutors::warn_of_one_gpu(const std::vector<Offer>& all) const {
  const auto first = [&](const Offer& offer) {
    return offer.memory.device.number == 0 && offer.memory.device.devices > 1 &&
           offer.memory.shares_device(all[0].memory);
  };
  if (host_.rank() != 0 || all.size() == 1 || !logging(LogLevel::warning)) return;
  if (!std::all_of(all.begin(), all.end(), first)) return;
  log(LogLevel::warning, {host_.rank(), host_.world()},
      "all ranks share GPU 0, although rank 0 sees " + std::to_string(all[0].memory.device.devices) +
          " GPUs: call torch.cuda.set_device(local_rank) before the first CUDA tensor");
}

/// Makes the parts that all ranks make together, if no rank lacks them.
void GpuExecutors::make(const std::vector<Offer>& all, Offer& mine) {
  const auto nobody = [&](Text Offer::* lacks) {
    return std::all_of(all.begin(), all.end(), [&](const Offer& offer) { return (offer.*lacks).empty(); });
  };
  if (!nobody(&Offer::no_device)) return;
  if (nobody(&Offer::no_nccl)) {
    try {
      communicator_ = meet(all[0].id);
      message_ = std::make_unique<GpuMessageExecutor>(*communicator_, device(), GpuMessageExecutor::Limits{},
                                                      host_.selector());
      collectives_.emplace(*communicator_);
    } catch (const Error& error) {
      mine.no_nccl = error.what();
    }
  }
  if (nobody(&Offer::no_peers)) {
    try {
      reach_peers(all);
    } catch (const Error& error) {
      mine.no_peers = error.what();
    }
  }
}

/// A refused rank goes on to the next exchange at once, and waits there for the ranks that give up.
std::unique_ptr<NcclCommunicator> GpuExecutors::meet(const NcclUniqueId& id) {
  const NcclCommunicator::Setup setup{
      .id = id,
      .rank = host_.rank(),
      .world = host_.world(),
      .max_ctas = parts_.max_ctas == 0 ? NcclCommunicator::Setup{}.max_ctas : parts_.max_ctas,
      .look =
          [this] {
            if (made_) return;  // whoever watches over the calls looks at the peers, too
            check_interrupts();
            host_.health().poll_failures();
          },
      .enter = [device = parts_.device, number = parts_.number] { device->use(number); }};
  return std::make_unique<NcclCommunicator>(*parts_.nccl, setup, Deadline::after(host_.timeout() / 2));
}

void GpuExecutors::reach_peers(const std::vector<Offer>& all) {
  std::vector<PeerMemory::Offer> offers;
  for (const Offer& offer : all) offers.push_back(offer.memory);
  memory_->open(offers, host_.rank());
  int blocks = std::min(kMostBlocks, PeerMemory::processors(offers));
  if (parts_.max_ctas > 0) blocks = std::min(blocks, parts_.max_ctas);
  GpuPullExecutor::Setup setup{host_.rank(), host_.world(),    memory_->regions(),          PeerMemory::kBytes,
                               blocks,       memory_->heaps(), memory_->offer().heap_bytes, host_.selector()};
  // From there on 8 bytes are stored and read as one, also on other devices.
  setup.low_latency = std::all_of(offers.begin(), offers.end(), [](const PeerMemory::Offer& offer) {
    return offer.device.architecture >= kLowLatencyArchitecture;
  });
  pull_ = std::make_unique<GpuPullExecutor>(device(), std::move(setup));
}

std::vector<GpuExecutors::Offer> GpuExecutors::exchange(const Offer& mine) {
  std::vector<Offer> all(static_cast<size_t>(host_.world()));
  Call call;
  call.collective = Collective::all_gather;
  call.count = sizeof(Offer);
  call.input = reinterpret_cast<const std::byte*>(&mine);
  call.output = reinterpret_cast<std::byte*>(all.data());
  host_.run(call);
  return all;
}

/// What must be the same on all ranks and is not, or "".
std::string GpuExecutors::difference(const std::vector<Offer>& all) {
  const auto of = [&](const char* what, auto Offer::* value) -> std::string {
    for (size_t q = 0; q < all.size(); ++q) {
      if (all[q].*value == all[0].*value) continue;
      return what + (" is " + std::to_string(all[0].*value)) + " on rank 0 and " + std::to_string(all[q].*value) +
             " on rank " + std::to_string(q);
    }
    return "";
  };
  std::string found = of(kVariable, &Offer::peer_bytes);
  if (found.empty()) found = of("max_ctas", &Offer::max_ctas);
  // It is set to the usual value on some ranks.
  if (found.empty() && !of("", &Offer::by_table).empty()) found = std::string(kVariable) + " is set on some ranks only";
  return found;
}

/// Drops the parts that some rank lacks. Throws if no part is left.
void GpuExecutors::drop(const std::vector<Offer>& all) {
  const auto told = [&](Text Offer::* lacks) {
    std::string reasons;
    for (size_t q = 0; q < all.size(); ++q) {
      if (!(all[q].*lacks).empty()) reasons += "; rank " + std::to_string(q) + ": " + (all[q].*lacks).text;
    }
    return reasons;
  };
  const std::string no_device = told(&Offer::no_device);
  no_nccl_ = told(&Offer::no_nccl);
  no_peers_ = told(&Offer::no_peers);
  const std::string differs = difference(all);
  if (!no_device.empty() || !differs.empty() || !no_peers_.empty()) {
    pull_.reset();
    if (memory_) memory_->give_up();
    memory_.reset();
  }
  if (!no_nccl_.empty()) {
    message_.reset();
    collectives_.reset();
    communicator_.reset();
  }
  const std::string who =
      "rank " + std::to_string(host_.rank()) + " of " + std::to_string(host_.world()) + ": no collectives on the GPU";
  if (!no_device.empty()) throw DeviceError(who + no_device);
  if (!differs.empty()) throw InvalidUsage(who + ": " + differs + ": set the same value on all ranks");
  if (!message_ && !pull_) throw DeviceError(who + ". NCCL" + no_nccl_ + ". Peers' memory" + no_peers_);
}

/// After an error a kernel of this rank's may still run, or be about to.
GpuExecutors::~GpuExecutors() {
  if (!host_.health().failure() && pull_) memory_->leave(kGoodbye);
}

/// The same on all ranks. In an all-to-all a rank does not know how long the others' blocks are, so there none can go
/// by that.
bool GpuExecutors::through_peers(const Call& call) const {
  if (!pull_ || (message_ && is_nccls_own(call.algorithm))) return false;
  if (!message_) return true;
  const bool exchange = call.collective == Collective::all_to_all;
  if (exchange ? !GpuPullExecutor::exchanges(call) : call.blocks != nullptr) return false;
  const size_t bytes = exchange ? 0 : buffer_bytes(call, host_.world());
  const auto way = host_.selector().way_for(call.collective, bytes, host_.world());
  return way && parts_.by_table != 0 ? *way == Way::peers : bytes <= parts_.peer_bytes;
}

void GpuExecutors::run(const Call& call, void* stream) {
  if (through_peers(call)) {
    if (call.blocks != nullptr && !GpuPullExecutor::exchanges(call)) {
      throw InvalidUsage(std::string(name(call.collective)) +
                         " on lists of tensors on a GPU needs NCCL, which this group cannot use" + no_nccl_);
    }
    if (is_nccls_own(call.algorithm)) {
      throw InvalidUsage(std::string(name(call.collective)) + ": the algorithm nccl needs NCCL, and there is none" +
                         no_nccl_);
    }
    last_ = &pull_->last_call();
    pull_->run(call, stream);
  } else {
    run_through_nccl(call, stream);
  }
}

void GpuExecutors::run_through_nccl(const Call& call, void* stream) {
  Call chosen = call;
  if (call.algorithm == nullptr && NcclCollectives::serves(call)) {
    chosen.algorithm = &message_->algorithm_for(call, /*nccls_own=*/true);
  }
  if (is_nccls_own(chosen.algorithm)) {
    last_ = &collectives_->last_call();
    collectives_->run(chosen, stream);
  } else {
    last_ = &message_->last_call();
    message_->run(chosen, stream);
  }
}

void GpuExecutors::exchange(const std::vector<Message>& messages, std::chrono::milliseconds timeout, void* stream) {
  if (!message_) throw InvalidUsage("send and recv on a GPU need NCCL, which this group cannot use" + no_nccl_);
  last_ = &message_->last_call();
  message_->exchange(messages, timeout, stream);
}

void GpuExecutors::check(const std::string& what) {
  if (communicator_) communicator_->check();
  if (pull_) pull_->check(what);
}

void GpuExecutors::abort(ErrorKind kind, const std::string& reason) noexcept {
  if (pull_) pull_->abort(kind, reason);  // first: NCCL's own end waits for all kernels of this process
  if (communicator_) communicator_->abort(kind, reason);
}

std::string GpuExecutors::describe() const {
  if (!message_) return "peer memory; no NCCL" + no_nccl_;
  const std::string nccl = "NCCL " + parts_.nccl->dotted();
  if (!pull_) return nccl + "; no peer memory" + no_peers_;
  return "peer memory up to " + std::to_string(parts_.peer_bytes) + " bytes, " + nccl + " beyond";
}

}  // namespace ringlet
