#include "engine/call.h"

#include "base/error.h"
#include "engine/authored.h"

namespace ringlet {
namespace {

constexpr uint64_t kRegistered = uint64_t{1} << 63;

// Bits of a signature: collective 0-3, uneven blocks 4, dtype 5-9, op 10-13, algorithm 14-31, root or label 32-47, history
// 48-61, valid 62, registered 63. An algorithm is a number that all processes give it.
constexpr int kDTypeShift = 5, kOpShift = 10, kAlgorithmShift = 14, kRootShift = 32;
constexpr int kHistoryShift = 48;
constexpr uint64_t kHistory = uint64_t{0x3fff} << kHistoryShift;
constexpr uint64_t kAuto = 2 * kFirstAuthoredId - 1;
constexpr uint64_t kUneven = uint64_t{1} << 4;
static_assert(kCollectives <= 1 << 4 && kDTypes <= 1 << 5 && kReduceOps <= 1 << 4 && kAuto < 1 << 18);
constexpr uint64_t kTotal = (uint64_t{1} << 34) - 1;  // an uneven call's count; above it is a digest of its lengths
constexpr uint64_t kValid = uint64_t{1} << 62;

uint64_t field(uint64_t signature, int shift, int bits) { return signature >> shift & ((uint64_t{1} << bits) - 1); }

Collective collective_in(uint64_t signature) noexcept { return static_cast<Collective>(field(signature, 0, 4)); }
DType dtype_in(uint64_t signature) noexcept { return static_cast<DType>(field(signature, kDTypeShift, 5)); }
ReduceOp op_in(uint64_t signature) noexcept { return static_cast<ReduceOp>(field(signature, kOpShift, 4)); }
/// The root, or the label if there is none.
uint64_t root_or_label(const Call& call) noexcept {
  return has_root(call.collective) ? static_cast<uint64_t>(call.root) : call.label;
}
int root_in(uint64_t signature) noexcept {
  return has_root(collective_in(signature)) ? static_cast<int>(field(signature, kRootShift, 16)) : 0;
}
CallLabel label_in(uint64_t signature) noexcept {
  return has_root(collective_in(signature)) ? kNoLabel : static_cast<CallLabel>(field(signature, kRootShift, 16));
}
uint64_t algorithm_in(uint64_t signature) noexcept { return field(signature, kAlgorithmShift, 18); }

uint64_t id_of(const Algorithm* algorithm) noexcept {
  if (algorithm == nullptr) return kAuto;
  return algorithm->authored != nullptr ? algorithm->authored->id : static_cast<uint64_t>(index_of(*algorithm));
}

/// Null for auto, and for an algorithm that only another process has.
const Algorithm* algorithm_of(uint64_t signature) noexcept {
  const uint64_t id = algorithm_in(signature);
  if (id == kAuto) return nullptr;
  if (id < kFirstAuthoredId) return id < built_in_algorithms() ? &algorithm_at(id) : nullptr;
  return authored_by_id(collective_in(signature), static_cast<uint32_t>(id));
}

/// Whether the numbers in a peer's signature mean anything here.
bool is_known(uint64_t signature) noexcept {
  return static_cast<int>(collective_in(signature)) < kCollectives && static_cast<int>(dtype_in(signature)) < kDTypes &&
         static_cast<int>(op_in(signature)) < kReduceOps;
}

}  // namespace

size_t input_elements(const Call& call, int rank, int world) noexcept {
  const Chunks chunks =
      input_chunks(call.collective, {rank, world, call.root}, is_divided(call.collective) ? 1 : world);
  return call.count * static_cast<size_t>(chunks.count);
}

size_t output_elements(const Call& call, int rank, int world) noexcept {
  const Chunks chunks =
      output_chunks(call.collective, {rank, world, call.root}, is_divided(call.collective) ? 1 : world);
  return call.count * static_cast<size_t>(chunks.count);
}

size_t buffer_bytes(const Call& call, int world) noexcept {
  return call.count * element_size(call.dtype) * (is_divided(call.collective) ? 1 : static_cast<size_t>(world));
}

void check_root(Collective collective, int64_t root, int world) {
  if (root >= 0 && root < world) return;
  throw InvalidUsage(std::string(name(collective)) + ": root must be a rank from 0 to " + std::to_string(world - 1) +
                     ", got " + std::to_string(root));
}

uint64_t signature_of(const Call& call, bool registered, uint64_t history) noexcept {
  const bool uneven = call.blocks != nullptr && call.blocks->uneven;
  return static_cast<uint64_t>(call.collective) | (uneven ? kUneven : 0) |
         static_cast<uint64_t>(call.dtype) << kDTypeShift | static_cast<uint64_t>(call.op) << kOpShift |
         id_of(call.algorithm) << kAlgorithmShift | root_or_label(call) << kRootShift |
         (history << kHistoryShift & kHistory) | kValid | (registered ? kRegistered : 0);
}

uint64_t signature_count(const Call& call) noexcept {
  // Before an all-to-all, each pair of ranks compares the blocks that it exchanges (comm/communicator.cc). No rank
  // knows the blocks of all pairs, so the signature cannot hold them.
  if (call.blocks == nullptr || !call.blocks->uneven || call.collective == Collective::all_to_all) return call.count;
  uint64_t total = 0, digest = 0;
  for (const size_t count : call.blocks->counts) {
    total += count;
    digest = (digest ^ count) * 0x9e3779b97f4a7c15u;
  }
  return (total & kTotal) | (digest & ~kTotal);
}

uint64_t meaning_of_signatures() noexcept {
  uint64_t digest = 14695981039346656037u;
  const auto mix = [&](const char* text) {
    do digest = (digest ^ static_cast<unsigned char>(*text)) * 1099511628211u;
    while (*text++ != '\0');
  };
  for (int i = 0; i < kCollectives; ++i) mix(name(static_cast<Collective>(i)));
  for (int i = 0; i < kDTypes; ++i) mix(name(static_cast<DType>(i)));
  for (int i = 0; i < kReduceOps; ++i) mix(name(static_cast<ReduceOp>(i)));
  for (size_t i = 0; i < built_in_algorithms(); ++i) {
    mix(algorithm_at(i).name);
    mix(name(algorithm_at(i).collective));
  }
  return digest;
}

bool registered_in(uint64_t signature) noexcept { return (signature & kRegistered) != 0; }

bool same_call(const CallSignature& a, const CallSignature& b) noexcept {
  return ((a.signature ^ b.signature) & ~kRegistered) == 0 && a.count == b.count;
}

bool same_but_for_history(const CallSignature& a, const CallSignature& b) noexcept {
  return ((a.signature ^ b.signature) & ~(kRegistered | kHistory)) == 0 && a.count == b.count;
}

uint64_t history_after(uint64_t history, const CallSignature& a) noexcept {
  const uint64_t mixed = (history ^ (a.signature & ~(kRegistered | kHistory)) ^ a.count << 20) * 0x9e3779b97f4a7c15u;
  return mixed ^ mixed >> 32;
}

namespace {

std::string arguments(const CallSignature& a) {
  const Collective collective = collective_in(a.signature);
  const bool uneven = (a.signature & kUneven) != 0;
  const uint64_t id = algorithm_in(a.signature);
  const Algorithm* algorithm = algorithm_of(a.signature);
  std::string text = std::string("(");
  text += algorithm != nullptr ? algorithm->name : id == kAuto ? "auto" : "an algorithm that this rank does not know";
  if (is_reduction(collective)) text += std::string(", ") + name(op_in(a.signature));
  if (collective != Collective::barrier) {
    text += std::string(", ") + name(dtype_in(a.signature)) + ", ";
    text += std::to_string(uneven ? a.count & kTotal : a.count) + (uneven ? " elements in uneven blocks" : " elements");
  }
  if (tells_lengths(collective, op_in(a.signature))) text += ", which tell the lengths of its blocks";
  if (has_root(collective)) text += ", root " + std::to_string(root_in(a.signature));
  if (const CallLabel label = label_in(a.signature); label != kNoLabel) text += ", " + label_text(label);
  return text + ")";
}

}  // namespace

CallSignature call_signature(const Call& call) noexcept {
  return {signature_of(call, /*registered=*/false, /*history=*/0), signature_count(call)};
}

Call call_of(const CallSignature& a) noexcept {
  Call call;
  call.collective = collective_in(a.signature);
  call.algorithm = algorithm_of(a.signature);
  call.dtype = dtype_in(a.signature);
  call.op = op_in(a.signature);
  call.root = root_in(a.signature);
  call.label = label_in(a.signature);
  call.count = (a.signature & kUneven) != 0 ? a.count & kTotal : a.count;
  return call;
}

std::string describe(const CallSignature& a, uint64_t sequence) {
  if ((a.signature & kValid) == 0) return "no call yet";
  if (!is_known(a.signature)) return "#" + std::to_string(sequence) + ", a call that this rank does not know";
  return std::string(name(collective_in(a.signature))) + " #" + std::to_string(sequence) + " " + arguments(a);
}

std::string arguments(const Call& call) { return arguments(call_signature(call)); }

std::string describe(Call call, const Algorithm* chosen) {
  if (chosen != nullptr) call.algorithm = chosen;
  return describe(call_signature(call), call.sequence);
}

}  // namespace ringlet
