#include "engine/call_check.h"

#include <algorithm>
#include <string>

#include "base/error.h"

namespace ringlet {
namespace {

bool overlap(const std::byte* a, size_t a_bytes, const std::byte* b, size_t b_bytes) {
  return a_bytes > 0 && b_bytes > 0 && a < b + b_bytes && b < a + a_bytes;
}

/// Whether input and output do not overlap, or form an in-place call: the same buffer if they have one length, else the
/// smaller one is this rank's block of the larger. In any other layout a call would overwrite data before it reads
/// them.
bool well_placed(const Call& call, int rank, int world) {
  if (call.input == call.output && is_divided(call.collective)) return true;
  const size_t size = element_size(call.dtype);
  const size_t in = input_elements(call, rank, world) * size, out = output_elements(call, rank, world) * size;
  if (!overlap(call.input, in, call.output, out)) return true;
  if (call.collective == Collective::all_to_all) return false;
  if (in == out) return call.input == call.output;
  const size_t own = static_cast<size_t>(rank) * std::min(in, out);
  return in < out ? call.input == call.output + own : call.output == call.input + own;
}

/// The same for lists: only this rank's own block may be input and output.
bool blocks_well_placed(const Call& call, int rank) {
  const Blocks& blocks = *call.blocks;
  const bool both = call.collective == Collective::all_to_all;  // are lists; otherwise one is a single tensor
  const size_t own = static_cast<size_t>(rank), size = element_size(call.dtype), sent = blocks.inputs.size();
  for (size_t i = 0; i < sent; ++i) {
    const size_t from = both || sent > 1 ? i : own;
    for (size_t j = 0; j < blocks.outputs.size(); ++j) {
      const size_t to = both ? sent + j : blocks.outputs.size() > 1 ? j : own;
      const std::byte *input = blocks.inputs[i], *output = blocks.outputs[j];
      if (!overlap(input, blocks.counts[from] * size, output, blocks.counts[to] * size)) continue;
      if (both || from != to || input != output) return false;
    }
  }
  return true;
}

}  // namespace

void check_call(const Call& call, int rank, int world) {
  const auto refuse = [&](const std::string& why) { throw InvalidUsage(name(call.collective) + why); };
  if (is_reduction(call.collective) && !supports(call.dtype, call.op)) {
    refuse(std::string(": ") + name(call.op) + " is not defined for " + name(call.dtype));
  }
  check_root(call.collective, call.root, world);
  if (call.blocks == nullptr) {
    if (call.input == nullptr && input_elements(call, rank, world) != 0) refuse(": this rank needs an input");
    if (call.output == nullptr && output_elements(call, rank, world) != 0) refuse(": this rank needs an output");
  }
  if (call.blocks != nullptr ? blocks_well_placed(call, rank) : well_placed(call, rank, world)) return;
  if (call.collective == Collective::all_to_all) {
    refuse(": output and input must not overlap: give each its own memory");
  }
  refuse(
      ": input and output partly overlap; for an in-place call pass the same buffer, or pass the smaller one as this " +
      ("rank's block (" + std::to_string(rank) + ") of the larger"));
}

}  // namespace ringlet
