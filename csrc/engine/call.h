// One collective call as the engines see it, and its signature: what must be the same on all ranks.
//
// Ownership: input and output belong to the caller until the call returns. Thread safety: plain data.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "schedule/collective.h"
#include "schedule/registry.h"
#include "transport/control.h"

namespace ringlet {

/// Where a rank's blocks lie when they are not one after the other in one tensor, or are not equally long.
struct Blocks {
  std::vector<std::byte*> inputs;   ///< of this rank's input chunks, in order
  std::vector<std::byte*> outputs;  ///< of this rank's output chunks, in order
  std::vector<size_t> counts;       ///< elements, by the schedule's chunk
  size_t longest = 0;               ///< of all blocks of all ranks
  bool uneven = false;
};

struct Choice;
/// Is told on the thread that runs a call how that is done, as soon as it is agreed.
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
  size_t count = 0;                  ///< elements: of the buffer where it is divided, of one block otherwise
  const std::byte* input = nullptr;  ///< null where this rank has none
  std::byte* output = nullptr;       ///< null where this rank has none; may be the input
  double scale = 1.0;                ///< premul_sum's factor, this rank's own
  uint64_t sequence = 0;             ///< how many calls this group made before
  std::chrono::milliseconds timeout{0};
  CallObserver* observer = nullptr;
  const Blocks* blocks = nullptr;  ///< instead of input and output, where blocks lie apart; count is then the longest
};

/// Elements of this rank's input and output for a call of that shape.
size_t input_elements(const Call& call, int rank, int world) noexcept;
size_t output_elements(const Call& call, int rank, int world) noexcept;
/// Of the schedule's whole buffer: what selector, thresholds and segments go by.
size_t buffer_bytes(const Call& call, int world) noexcept;

/// Packs collective, algorithm, dtype, op and root; `registered` says that peers may read input and output in place.
/// `history` stands for all calls before: ranks that parted in a call in which neither needed the other (broadcasts
/// from two roots) find out in the next one in which they meet.
uint64_t signature_of(const Call& call, bool registered, uint64_t history) noexcept;
uint64_t history_after(uint64_t history, const CallSignature& signature) noexcept;
/// What stands for the call's size in its signature: equal on all ranks where their blocks are.
uint64_t signature_count(const Call& call) noexcept;
bool registered_in(uint64_t signature) noexcept;
bool same_call(const CallSignature& a, const CallSignature& b) noexcept;  ///< all but the memory
bool same_but_for_history(const CallSignature& a, const CallSignature& b) noexcept;

/// What was announced: collective, algorithm, dtype, operation, root and count.
Call call_of(const CallSignature& signature) noexcept;
/// How a call is announced that has no history.
CallSignature call_signature(const Call& call) noexcept;

/// "all_reduce #12 (ring, sum, float32, 1048576 elements)"
std::string describe(const CallSignature& signature, uint64_t sequence);
/// The part in parentheses.
std::string arguments(const Call& call);
/// Of a call that is run with `chosen` where that is given.
std::string describe(Call call, const Algorithm* chosen = nullptr);

}  // namespace ringlet
