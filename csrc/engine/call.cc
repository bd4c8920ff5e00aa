#include "engine/call.h"

namespace ringlet {
namespace {

constexpr uint64_t kRegistered = uint64_t{1} << 63;

// Bits of a signature: collective 0-6, uneven blocks 7, algorithm 8-15, dtype 16-23, op 24-31, root 32-47, history
// 48-61, valid 62, registered 63.
constexpr int kHistoryShift = 48;
constexpr uint64_t kHistory = uint64_t{0x3fff} << kHistoryShift;
constexpr uint64_t kAuto = 0xff;
constexpr uint64_t kUneven = uint64_t{1} << 7;
constexpr uint64_t kTotal =
    (uint64_t{1} << 48) - 1;  // bits of an uneven call's count; the bits above are a digest of the lengths
constexpr uint64_t kValid = uint64_t{1} << 62;

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

uint64_t signature_of(const Call& call, bool registered, uint64_t history) noexcept {
  const uint64_t algorithm = call.algorithm != nullptr ? static_cast<uint64_t>(index_of(*call.algorithm)) : kAuto;
  const bool uneven = call.blocks != nullptr && call.blocks->uneven;
  return static_cast<uint64_t>(call.collective) | (uneven ? kUneven : 0) | algorithm << 8 |
         static_cast<uint64_t>(call.dtype) << 16 | static_cast<uint64_t>(call.op) << 24 |
         static_cast<uint64_t>(call.root) << 32 | (history << kHistoryShift & kHistory) | kValid |
         (registered ? kRegistered : 0);
}

uint64_t signature_count(const Call& call) noexcept {
  // Pairs of ranks have compared the blocks of an all-to-all before (comm/communicator.cc), and no rank knows all of
  // them.
  if (call.blocks == nullptr || !call.blocks->uneven || call.collective == Collective::all_to_all) return call.count;
  uint64_t total = 0, digest = 0;
  for (const size_t count : call.blocks->counts) {
    total += count;
    digest = (digest ^ count) * 0x9e3779b97f4a7c15u;
  }
  return (total & kTotal) | (digest & ~kTotal);
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

Collective collective_in(uint64_t signature) noexcept { return static_cast<Collective>(signature & 0xff & ~kUneven); }

std::string arguments(const CallSignature& a) {
  const auto field = [&](int shift) { return a.signature >> shift & 0xff; };
  const Collective collective = collective_in(a.signature);
  const bool uneven = (field(0) & kUneven) != 0;
  const char* algorithm = field(8) == kAuto ? "auto" : algorithms()[field(8)].name;
  std::string text = std::string("(") + algorithm;
  if (is_reduction(collective)) text += std::string(", ") + name(static_cast<ReduceOp>(field(24)));
  if (collective != Collective::barrier) {
    text += std::string(", ") + name(static_cast<DType>(field(16))) + ", ";
    text += std::to_string(uneven ? a.count & kTotal : a.count) + (uneven ? " elements in uneven blocks" : " elements");
  }
  if (has_root(collective)) text += ", root " + std::to_string(a.signature >> 32 & 0xffff);
  return text + ")";
}

}  // namespace

CallSignature call_signature(const Call& call) noexcept {
  return {signature_of(call, /*registered=*/false, /*history=*/0), signature_count(call)};
}

Call call_of(const CallSignature& a) noexcept {
  Call call;
  const uint64_t algorithm = a.signature >> 8 & 0xff;
  call.collective = collective_in(a.signature);
  call.algorithm = algorithm == kAuto ? nullptr : &algorithms()[algorithm];
  call.dtype = static_cast<DType>(a.signature >> 16 & 0xff);
  call.op = static_cast<ReduceOp>(a.signature >> 24 & 0xff);
  call.root = static_cast<int>(a.signature >> 32 & 0xffff);
  call.count = (a.signature & kUneven) != 0 ? a.count & kTotal : a.count;
  return call;
}

std::string describe(const CallSignature& a, uint64_t sequence) {
  if ((a.signature & kValid) == 0) return "no call yet";
  return std::string(name(collective_in(a.signature))) + " #" + std::to_string(sequence) + " " + arguments(a);
}

std::string arguments(const Call& call) { return arguments(call_signature(call)); }

std::string describe(Call call, const Algorithm* chosen) {
  if (chosen != nullptr) call.algorithm = chosen;
  return describe(call_signature(call), call.sequence);
}

}  // namespace ringlet
