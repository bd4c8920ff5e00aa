// One collective call as the engines see it, and its signature, which must be the same on all ranks.
//
// Ownership: input and output belong to the caller until the call returns. Thread safety: plain data.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "engine/call_label.h"
#include "schedule/collective.h"
#include "schedule/registry.h"
#include "transport/control.h"

namespace ringlet {

/// The blocks of a rank, if they are not adjacent in one tensor, or are not equally long.
struct Blocks {
  std::vector<std::byte*> inputs;   ///< of this rank's input chunks, in order
  std::vector<std::byte*> outputs;  ///< of this rank's output chunks, in order
  std::vector<size_t> counts;       ///< elements, by the schedule's chunk
  size_t longest = 0;               ///< of all blocks of all ranks
  bool uneven = false;
};

struct Choice;
/// Is told how the engine carries out a call, on the thread that runs it, as soon as the ranks agree.
class CallObserver {
 public:
  virtual void chosen(const Choice& choice) = 0;

 protected:
  ~CallObserver() = default;
};

struct Call {
  Collective collective = Collective::barrier;
  const Algorithm* algorithm = nullptr;  ///< null: the selector's choice
  DType dtype = DType::uint8;
  ReduceOp op = ReduceOp::sum;
  int root = 0;
  CallLabel label = kNoLabel;        ///< of a call without root
  size_t count = 0;                  ///< elements: of the whole buffer if it is divided, of one block otherwise
  const std::byte* input = nullptr;  ///< null if this rank has none
  std::byte* output = nullptr;       ///< null if this rank has none; may be the input
  double scale = 1.0;                ///< premul_sum's factor, this rank's own
  uint64_t sequence = 0;             ///< how many calls this group made before
  std::chrono::milliseconds timeout{0};
  CallObserver* observer = nullptr;
  const Blocks* blocks = nullptr;  ///< instead of input and output, if blocks lie apart; count is then the longest
};

/// Elements of this rank's input and output.
size_t input_elements(const Call& call, int rank, int world) noexcept;
size_t output_elements(const Call& call, int rank, int world) noexcept;
/// The bytes of the schedule's whole buffer. The selector, the thresholds and the segments depend on this size.
size_t buffer_bytes(const Call& call, int world) noexcept;

/// Packs collective, algorithm, dtype, op, and root or label. `registered`: peers may read input and output in place. `history`
/// is a digest of all calls before: ranks that made different calls in which neither needed the other (broadcasts from
/// two roots) detect that in the next call in which they exchange data.
uint64_t signature_of(const Call& call, bool registered, uint64_t history) noexcept;
uint64_t history_after(uint64_t history, const CallSignature& signature) noexcept;
/// The size of the call in its signature: equal on all ranks if their blocks are equal.
uint64_t signature_count(const Call& call) noexcept;
/// A digest of what the numbers in signatures stand for: it differs between two builds that have other algorithms,
/// dtypes, operations or collectives.
uint64_t meaning_of_signatures() noexcept;
bool registered_in(uint64_t signature) noexcept;
bool same_call(const CallSignature& a, const CallSignature& b) noexcept;  ///< all but the memory
bool same_but_for_history(const CallSignature& a, const CallSignature& b) noexcept;

/// Unpacks collective, algorithm, dtype, operation, root or label, and count.
Call call_of(const CallSignature& signature) noexcept;
/// The signature of a call without history.
CallSignature call_signature(const Call& call) noexcept;

/// Throws InvalidUsage unless `root` is a rank.
void check_root(Collective collective, int64_t root, int world);

/// The operation of an all-to-all in which ranks tell each other the lengths of the blocks of the one that follows.
inline constexpr ReduceOp kTellsLengths = ReduceOp::max;
constexpr bool tells_lengths(Collective collective, ReduceOp op) {
  return collective == Collective::all_to_all && op == kTellsLengths;
}

/// "all_reduce #12 (ring, sum, float32, 1048576 elements)"
std::string describe(const CallSignature& signature, uint64_t sequence);
/// The part in parentheses.
std::string arguments(const Call& call);
/// Of a call that runs with `chosen`, if that is given.
std::string describe(Call call, const Algorithm* chosen = nullptr);

}  // namespace ringlet
