#include "gpu/gpu_pull_executor.h"

#include <algorithm>
#include <atomic>
#include <utility>

#include "base/error.h"
#include "base/partition.h"
#include "engine/selector.h"
#include "gpu/check_device.h"
#include "gpu/pull_program.h"

namespace ringlet {
namespace {

using cuda::LowLayout;
using cuda::PullArgs;
using cuda::PullLayout;
using cuda::PullProgram;
using cuda::PullSource;
using cuda::PullStep;

static_assert(cuda::kMostRanks <= 32);  // bits of a word
static_assert(at(1, 0) == uint64_t{1} << 16 && kCompleted == 1u << 16 && kSignatureReady == 1 && ready(0) == 2);

// Of a piece, in one chunk: at most, where no staging buffer limits it, and at least, if the message has as much.
constexpr size_t kPieceBytes = size_t{64} << 10, kLeastBytes = size_t{4} << 10;

// Blocks of a kernel for a small message: more would have less than a way to a peer's memory carries at once.
constexpr int kFewBlocks = 16;
constexpr size_t kFewBytes = size_t{256} << 10;

constexpr size_t kProgramBytes = size_t{256} << 10;  // of plans, at first

constexpr const char *kPairwise = "pairwise", *kOneShot = "one_shot";

constexpr std::chrono::milliseconds kLongest = std::chrono::hours(24 * 365);  // in nanoseconds, still a number

std::string named(int rank) { return "rank " + std::to_string(rank); }

}  // namespace

GpuPullExecutor::GpuPullExecutor(const RingletCudaDevice& device, Setup setup)
    : device_(device), setup_(std::move(setup)), copies_(device) {
  if (setup_.world > cuda::kMostRanks) {
    throw InvalidUsage("peer memory serves up to " + std::to_string(cuda::kMostRanks) + " ranks, not " +
                       std::to_string(setup_.world) + "; use NCCL");
  }
  const size_t low = setup_.low_latency ? low_layout().bytes() : 0;
  if (setup_.blocks < 1 || setup_.region_bytes < PullLayout{setup_.blocks, setup_.world, 0, 0}.staging() + low) {
    throw InvalidUsage("a region of " + std::to_string(setup_.region_bytes) + " bytes has no room for " +
                       std::to_string(setup_.blocks) + " blocks");
  }
  void* mapped = nullptr;
  check_device(device_, device_.allocate_mapped(&mapped, sizeof(cuda::PullHost)), "allocating memory of the host's");
  host_ = static_cast<cuda::PullHost*>(mapped);
  try {
    clear_flags();
    reserve(kProgramBytes);
  } catch (...) {
    device_.release_mapped(host_);
    throw;
  }
}

/// A group before may have left the same numbers in the region.
void GpuPullExecutor::clear_flags() const {
  if (!setup_.low_latency) return;
  const std::vector<std::byte> zeros(low_layout().bytes());
  std::byte* start = setup_.regions[static_cast<size_t>(setup_.rank)] + low_layout().start;
  check_device(device_, copies_.upload(start, zeros.data(), zeros.size()), "zeroing memory for peers");
}

GpuPullExecutor::~GpuPullExecutor() {
  for (void* memory : owned_) device_.release(memory);
  device_.release_mapped(host_);
}

void GpuPullExecutor::reserve(size_t bytes) {
  void* memory = nullptr;
  check_device(device_, device_.allocate(&memory, bytes), "allocating room for plans");
  owned_.push_back(memory);
  free_ = static_cast<std::byte*>(memory);
  room_ = bytes;
}

/// To room that there is already, mostly: allocating may wait for the device, where other ranks' kernels may wait for
/// this one's.
const std::byte* GpuPullExecutor::upload(const void* data, size_t bytes) {
  const size_t wanted = round_up(bytes, 16);
  if (wanted > room_) reserve(std::max(wanted, kProgramBytes));
  if (bytes > 0) check_device(device_, copies_.upload(free_, data, bytes), "uploading a plan");
  free_ += wanted;
  room_ -= wanted;
  return free_ - wanted;
}

const GpuPullExecutor::Uploaded& GpuPullExecutor::plan_for(const Algorithm& algorithm, int root, bool in_place) {
  const auto index = static_cast<uint64_t>(index_of(algorithm));
  std::unique_ptr<Uploaded>& known = plans_[index << 33 | uint64_t{in_place} << 32 | static_cast<uint32_t>(root)];
  if (!known) {
    auto made = std::make_unique<Uploaded>();
    const RankInfo info{setup_.rank, setup_.world, root};
    made->plan = make_pull_plan(algorithm, info, in_place);
    made->ends_in_place = in_place || ends_in_place(algorithm, info);
    const FlatPlan flat = flatten(made->plan, setup_.rank);
    const std::byte* steps = upload(flat.steps.data(), flat.steps.size() * sizeof(PullStep));
    const std::byte* sources = upload(flat.sources.data(), flat.sources.size() * sizeof(PullSource));
    made->program = {reinterpret_cast<const PullStep*>(steps),
                     reinterpret_cast<const PullSource*>(sources),
                     static_cast<int>(flat.steps.size()),
                     static_cast<int>(flat.sources.size()),
                     flat.body,
                     /*width=*/0,
                     /*pieces=*/0};
    known = std::move(made);
  }
  return *known;
}

bool GpuPullExecutor::exchanges(const Call& call) noexcept {
  if (call.collective != Collective::all_to_all) return false;
  return call.algorithm == nullptr || std::string_view(call.algorithm->name) == kPairwise;
}

PullLayout GpuPullExecutor::layout() const {
  PullLayout layout{setup_.blocks, setup_.world, 0, 0};
  const size_t areas = static_cast<size_t>(setup_.blocks) * 2;
  const size_t room = setup_.low_latency ? low_layout().start : setup_.region_bytes;
  layout.area_bytes = (room - layout.staging()) / areas / cuda::kPackBytes * cuda::kPackBytes;
  return layout;
}

/// How a plan cuts the message: the same on all ranks, since it depends on nothing that differs between them.
void GpuPullExecutor::cut(const PullPlan& plan, const Call& call, PullArgs& args, PullProgram& program) const {
  program.width = std::max<size_t>(1, kPieceBytes / args.size);
  if (plan.staging_buffers > 0) {
    const PullLayout& layout = args.layout;
    const size_t slots = 2 * args.parts;  // of an area
    const size_t room = layout.area_bytes / slots / cuda::kPackBytes * cuda::kPackBytes;
    if (room < cuda::kPackBytes + args.size) {
      const size_t area = slots * round_up(cuda::kPackBytes + args.size, cuda::kPackBytes);
      throw InvalidUsage(describe(call) + " on a GPU needs regions of at least " +
                         std::to_string(layout.staging() + static_cast<size_t>(setup_.blocks) * 2 * area) +
                         " bytes, and they have " + std::to_string(setup_.region_bytes));
    }
    args.layout.slot_bytes = std::min(room, kPieceBytes + cuda::kPackBytes);
    program.width = (args.layout.slot_bytes - cuda::kPackBytes) / args.size;
  }
  // Pieces of whole packs, so that all but a chunk's first and last elements move 16 bytes at a time.
  const size_t per_pack = std::max<size_t>(1, cuda::kPackBytes / args.size);
  if (program.width > per_pack) program.width = program.width / per_pack * per_pack;
  // And something for every block, but no less than its threads take at once.
  const size_t longest = args.length + (args.longer > 0 ? 1 : 0);
  const size_t share = round_up(ceil_div(longest, static_cast<size_t>(args.blocks)), per_pack);
  program.width = std::min(program.width, std::max(share, round_up(kLeastBytes / args.size, per_pack)));
  program.pieces = std::max<size_t>(1, ceil_div(longest, program.width));
}

/// Whether peers can read such memory of this rank's where it lies.
bool GpuPullExecutor::inside_heap(const std::byte* tensor, size_t bytes) const {
  if (bytes == 0) return true;
  if (setup_.heaps.empty()) return false;
  const auto begin = reinterpret_cast<uintptr_t>(setup_.heaps[static_cast<size_t>(setup_.rank)]);
  const auto at = reinterpret_cast<uintptr_t>(tensor);
  return at >= begin && bytes <= setup_.heap_bytes && at - begin <= setup_.heap_bytes - bytes;
}

/// All that this rank gives and gets. A scaled input peers must see scaled.
bool GpuPullExecutor::in_heap(const Call& call) const {
  if (setup_.heaps.empty() || call.op == ReduceOp::premul_sum || call.collective == Collective::barrier) return false;
  const size_t size = element_size(call.dtype);
  return inside_heap(call.input, input_elements(call, setup_.rank, setup_.world) * size) &&
         inside_heap(call.output, output_elements(call, setup_.rank, setup_.world) * size);
}

/// What a kernel needs to meet its peers in this call. The budget is somewhat less than the timeout, so that who waits in
/// vain says for whom before the host gives the call up.
void GpuPullExecutor::fill(const Call& call, cuda::PullRanks& ranks) const {
  ranks.call.signature = signature_of(call, /*registered=*/false, /*history=*/0);
  ranks.call.count = signature_count(call);
  ranks.call.sequence = call.sequence;
  ranks.rank = setup_.rank;
  ranks.world = setup_.world;
  ranks.blocks = setup_.blocks;
  ranks.layout = layout();
  ranks.host = host_;
  ranks.budget = static_cast<uint64_t>(std::chrono::nanoseconds(std::min(call.timeout, kLongest)).count()) / 10 * 9;
  for (size_t q = 0; q < setup_.regions.size(); ++q) {
    ranks.regions[q] = setup_.regions[q];
    ranks.heaps[q] = setup_.heaps.empty() ? nullptr : setup_.heaps[q];
  }
}

void GpuPullExecutor::place(const CallLayout& layout, bool in_heap, PullArgs& args) const {
  args.input = layout.input_origin();
  args.output = layout.output_origin();
  const auto heap = reinterpret_cast<uintptr_t>(args.heaps[setup_.rank]);
  args.call.input = reinterpret_cast<uintptr_t>(args.input) - heap;
  args.call.output = reinterpret_cast<uintptr_t>(args.output) - heap;
  args.call.in_heap = in_heap ? 1 : 0;
  // Mostly both lie alike; where they do not, what is read of peers decides.
  args.call.skew = cuda::past_pack(layout.inputs().count != 0 ? args.input : args.output);
}

void GpuPullExecutor::run(const Call& call, void* stream) {
  if (failure_.failed()) failure_.raise("");
  if (exchanges(call)) {
    exchange(call, stream);
  } else {
    run_plan(call, stream);
  }
}

/// The same on all ranks, which do not know yet where the others' tensors are.
Call GpuPullExecutor::with_algorithm(const Call& given) const {
  Call call = given;
  if (call.algorithm == nullptr) {
    Situation situation{call.collective, buffer_bytes(call, setup_.world), setup_.world, /*in_place=*/false};
    situation.way = Way::peers;
    call.algorithm = &setup_.selector.choose(situation);
  }
  return call;
}

void GpuPullExecutor::run_plan(const Call& given, void* stream) {
  const Call call = with_algorithm(given);
  if (is_low_latency(call)) return run_low_latency(call, stream);
  const Uploaded& staged = plan_for(*call.algorithm, call.root, false);
  const bool readable = staged.ends_in_place && in_heap(call);
  PullArgs args{};
  fill(call, args);
  args.parts = static_cast<size_t>(staged.plan.parts);
  const CallLayout layout(call, {setup_.rank, setup_.world, call.root}, staged.plan.parts);
  args.length = layout.length(staged.plan.parts - 1);  // the last chunk is the shortest
  args.longer = layout.divided() ? call.count - args.length * args.parts : 0;
  args.size = layout.element_bytes();
  args.scale = call.scale;
  args.divisor = call.op == ReduceOp::avg ? setup_.world : 1;
  args.premul = call.op == ReduceOp::premul_sum;
  // A collective that combines nothing copies bytes, which any of the kernels does.
  const bool reduces = is_reduction(call.collective);
  args.op = reduces ? call.op : ReduceOp::bor;
  const size_t whole = (args.length * args.parts + args.longer) * args.size;
  args.blocks = whole <= kFewBytes ? std::min(kFewBlocks, setup_.blocks) : setup_.blocks;
  args.staged = staged.program;
  cut(staged.plan, call, args, args.staged);
  if (readable) {
    const Uploaded& in_place = plan_for(*call.algorithm, call.root, true);
    args.in_place = in_place.program;
    cut(in_place.plan, call, args, args.in_place);
  }
  place(layout, readable, args);
  last_ = describe(call);
  check_device(device_, device_.pull(&args, reduces ? call.dtype : DType::uint8, stream), "launching a pull kernel");
}

/// At the end of a region.
LowLayout GpuPullExecutor::low_layout() const {
  const size_t bytes = LowLayout::make(0, setup_.blocks, setup_.world).bytes();
  const size_t start = setup_.region_bytes < bytes ? 0 : setup_.region_bytes - bytes;
  return LowLayout::make(start / PullLayout::kLine * PullLayout::kLine, setup_.blocks, setup_.world);
}

/// Of a call with an algorithm: the same on all ranks.
bool GpuPullExecutor::is_low_latency(const Call& call) const {
  if (!setup_.low_latency || call.algorithm != find_algorithm(Collective::all_reduce, kOneShot)) return false;
  const bool served = call.dtype == DType::float32 || call.dtype == DType::float16 || call.dtype == DType::bfloat16;
  const size_t bytes = call.count * element_size(call.dtype);
  return served && (call.op == ReduceOp::sum || call.op == ReduceOp::avg) && bytes > 0 &&
         bytes <= low_layout().most_bytes();
}

void GpuPullExecutor::run_low_latency(const Call& call, void* stream) {
  cuda::LowArgs args{};
  fill(call, args);
  args.low = low_layout();
  args.input = call.input;
  args.output = call.output;
  args.bytes = call.count * element_size(call.dtype);
  const size_t share = round_up(ceil_div(args.bytes, static_cast<size_t>(setup_.blocks)), LowLayout::kPacketBytes);
  args.piece = std::min(std::max(share, LowLayout::kLeastPieceBytes), args.low.piece_bytes());
  args.blocks = static_cast<int>(ceil_div(args.bytes, args.piece));
  args.divisor = call.op == ReduceOp::avg ? setup_.world : 1;
  last_ = describe(call);
  check_device(device_, device_.low_latency(&args, call.dtype, call.op, stream), "launching a low-latency kernel");
}

/// No rank knows how long the blocks between two others are: how all are cut the kernels find out together.
void GpuPullExecutor::exchange(const Call& given, void* stream) {
  Call call = given;  // as all ranks must make it: whether this rank's blocks are equal says nothing about the others'
  call.algorithm = find_algorithm(Collective::all_to_all, kPairwise);
  call.blocks = nullptr;
  cuda::ExchangeArgs args{};
  fill(call, args);
  args.size = element_size(call.dtype);
  lay_blocks(given, args);
  cuda::PullLayout& cut = args.layout;
  cut.slot_bytes = cut.area_bytes / static_cast<size_t>(setup_.world) / cuda::kPackBytes * cuda::kPackBytes;
  if (cut.slot_bytes < 2 * cuda::kPackBytes) {
    throw InvalidUsage(describe(given) + " on a GPU: regions of " + std::to_string(setup_.region_bytes) +
                       " bytes have no room for a piece of every block");
  }
  args.most_bytes = std::min(kPieceBytes, cut.slot_bytes - cuda::kPackBytes);
  args.least_bytes = std::min(kLeastBytes, args.most_bytes);
  last_ = describe(given, call.algorithm);
  check_device(device_, device_.exchange(&args, stream), "launching an exchange kernel");
}

void GpuPullExecutor::lay_blocks(const Call& call, cuda::ExchangeArgs& args) const {
  const auto world = static_cast<size_t>(setup_.world), own = static_cast<size_t>(setup_.rank);
  const CallLayout layout(call, {setup_.rank, setup_.world}, 2 * setup_.world);
  bool all_in_heap = true;
  for (size_t q = 0; q < world; ++q) {
    const int to = static_cast<int>(q), from = static_cast<int>(world + q);
    args.sent[q] = layout.length(to);
    args.received[q] = layout.length(from);
    args.inputs[q] = layout.input(to, 0);
    args.outputs[q] = layout.output(from, 0);
    args.longest = std::max<uint64_t>(args.longest, args.sent[q] * args.size);
    all_in_heap = all_in_heap && inside_heap(args.inputs[q], args.sent[q] * args.size);
  }
  if (args.sent[own] != args.received[own]) {
    throw InvalidUsage(describe(call) + " on a GPU: rank " + std::to_string(own) + " sends itself " +
                       std::to_string(args.sent[own]) + " elements and expects " + std::to_string(args.received[own]));
  }
  args.call.in_heap = all_in_heap && !setup_.heaps.empty() ? 1 : 0;
}

void GpuPullExecutor::check(const std::string& in) const {
  if (failure_.failed()) failure_.raise("");
  const auto seen = [](uint64_t& word) { return std::atomic_ref(word).load(std::memory_order_acquire); };
  const cuda::PullEnd end{seen(host_->end.own), seen(host_->end.told)};
  const uint64_t word = end.own != 0 ? end.own : end.told;
  if (word == 0) return;
  const int rank = cuda::rank_of(word), peer = static_cast<int>(word >> 46 & 0xff);
  const auto block = static_cast<int>(word >> 32 & 0x3fff);
  const auto phase = static_cast<uint32_t>(word);
  const std::string where = this_rank() + " in or before " + in + " on a GPU: ";
  if ((word & cuda::kOtherCall) != 0) refuse_other_call(in, peer, block, phase);
  const std::string other = named(rank) + " gave its call up";
  if (rank == peer) throw KernelTimeout(where + other);
  const std::string whom =
      "for " + named(peer) + ", at " +
      (phase >= ready(0) && phase < kCompleted ? "round " + std::to_string(phase - ready(0)) : "the start of a piece");
  const std::string here = "block " + std::to_string(block);
  if (end.own == 0) throw KernelTimeout(where + other + ", whose " + here + " waited " + whom);
  if (rank != setup_.rank) throw KernelTimeout(where + other + " while " + here + " waited " + whom);
  throw KernelTimeout(where + here + " waited too long " + whom +
                      "; that rank has not made the call, or its kernel does not run");
}

std::string GpuPullExecutor::this_rank() const { return named(setup_.rank) + " of " + std::to_string(setup_.world); }

/// What a rank called is in this rank's incoming area, under the epoch in which its block came to an end, or at the
/// start of a line of words.
cuda::PullCall GpuPullExecutor::told_call(int rank, int block, bool low) const {
  cuda::PullCall call{};
  uint64_t number = 0;
  if (!low) {
    read(&number, layout().progress(block, setup_.rank), sizeof number);
    read(&call, layout().call(block, rank, number >> 16), sizeof call);
    return call;
  }
  uint64_t head[LowLayout::kHead] = {};
  read(&number, low_layout().number(block), sizeof number);
  read(head, low_layout().line(block, number + 1, rank), sizeof head);
  const auto whole = [&](size_t i) { return head[i + 1] << 32 | static_cast<uint32_t>(head[i]); };
  call.signature = whole(0);
  call.count = whole(2);
  call.sequence = whole(4);
  return call;
}

/// Names both calls; of two all-to-alls the lengths that differ.
void GpuPullExecutor::refuse_other_call(const std::string& in, int peer, int block, uint32_t expected) const {
  // A block that begins later may have told the host of the failure, and has not seen the calls. The block that gave up
  // wrote this word after it had compared them.
  uint64_t written_last = 0;
  read(&written_last, offsetof(cuda::PullEnd, own), sizeof written_last);
  const bool low = expected == cuda::kLowPhase;
  const cuda::PullCall own = told_call(setup_.rank, block, low), theirs = told_call(peer, block, low);
  const auto words = [](const cuda::PullCall& call) { return describe({call.signature, call.count}, call.sequence); };
  const std::string me = named(setup_.rank), other = named(peer);
  const std::string what = this_rank() + " in or before " + in + " on a GPU: ";
  if (own.signature == theirs.signature && call_of({own.signature, 0}).collective == Collective::all_to_all) {
    throw InvalidUsage(what + other + " sends " + me + " " + std::to_string(theirs.count) + " elements, and " + me +
                       " expects " + std::to_string(expected));
  }
  throw InvalidUsage(what + "calls do not match: " + me + " called " + words(own) + ", " + other + " " + words(theirs));
}

void GpuPullExecutor::abort(ErrorKind kind, const std::string& reason) noexcept {
  failure_.set(kind, reason);
  const uint64_t word = cuda::pull_failure(setup_.rank, setup_.rank, 0, 0);
  // First what takes no call to the device: kernels that wait look there, also while a launch waits for them.
  std::atomic_ref(host_->ended).store(word, std::memory_order_release);
  copies_.upload(setup_.regions[static_cast<size_t>(setup_.rank)], &word, sizeof word);
}

/// From this rank's region.
void GpuPullExecutor::read(void* to, size_t offset, size_t bytes) const {
  const std::byte* from = setup_.regions[static_cast<size_t>(setup_.rank)] + offset;
  check_device(device_, copies_.download(to, from, bytes), "reading a region");
}

}  // namespace ringlet
