// Calls on blocks of different lengths: what ranks compare before, and which algorithms take them.
#include <algorithm>
#include <string>
#include <vector>

#include "base/error.h"
#include "comm/communicator.h"

namespace ringlet {

/// In an all-to-all a rank knows only its own row and column. Pairs of ranks compare the lengths that they will
/// exchange, and all ranks learn the longest block, which decides how the call is cut into segments.
void Communicator::agree_on_blocks(const Call& call, Blocks& blocks, bool background) {
  const size_t world = static_cast<size_t>(world_);
  const auto [least, most] = std::minmax_element(blocks.counts.begin(), blocks.counts.end());
  blocks.longest = *most;
  blocks.uneven = false;  // a rank's own blocks say nothing about the other ranks' blocks
  std::vector<int64_t> mine(3 * world), theirs(3 * world);
  for (size_t q = 0; q < world; ++q) {
    mine[3 * q] = static_cast<int64_t>(blocks.counts[q]);
    mine[3 * q + 1] = static_cast<int64_t>(*most);
    mine[3 * q + 2] = static_cast<int64_t>(*least);
  }
  Call lengths = call;
  lengths.blocks = nullptr;
  lengths.dtype = DType::int64;
  lengths.op = kTellsLengths;  // so that no other all-to-all has this call's signature
  lengths.count = 3;
  lengths.input = reinterpret_cast<const std::byte*>(mine.data());
  lengths.output = reinterpret_cast<std::byte*>(theirs.data());
  run_now(lengths, background);
  int64_t shortest = mine[2];
  for (size_t q = 0; q < world; ++q) {
    blocks.longest = std::max(blocks.longest, static_cast<size_t>(theirs[3 * q + 1]));
    shortest = std::min(shortest, theirs[3 * q + 2]);
    const int64_t expected = static_cast<int64_t>(blocks.counts[world + q]);
    if (theirs[3 * q] == expected) continue;
    health().fail(ErrorKind::invalid_usage, "all_to_all #" + std::to_string(call.sequence) +
                                                ": calls do not match: rank " + std::to_string(q) + " sends " +
                                                std::to_string(theirs[3 * q]) + " elements to rank " +
                                                std::to_string(rank_) + ", which expects " + std::to_string(expected));
  }
  if (static_cast<size_t>(shortest) != blocks.longest) refuse_moved_blocks(call, blocks.longest);
}

/// A block's place in another block's tensor has room for that block. Nothing has moved, and all ranks refuse alike.
void Communicator::refuse_moved_blocks(const Call& call, size_t longest) const {
  const bool may_be_authored =
      call.algorithm != nullptr ? call.algorithm->authored != nullptr : selector().names_authored();
  if (!may_be_authored) return;  // those that are built in keep every block in its place
  Call even = call;
  even.blocks = nullptr;
  even.count = longest;
  for (const bool registered : {false, true}) {
    const Algorithm& algorithm = call.algorithm != nullptr
                                     ? *call.algorithm
                                     : engine_->algorithm_for(call.collective, buffer_bytes(even, world_), registered);
    if (algorithm.authored == nullptr ||
        algorithm.authored->keeps_lengths({rank_, world_, call.root, engine_->topology()}))
      continue;
    throw InvalidUsage(std::string(name(call.collective)) + " algorithm \"" + algorithm.name +
                       "\" keeps blocks in the places of other blocks, so it takes blocks of one size only: choose "
                       "another algorithm for uneven blocks");
  }
}

}  // namespace ringlet
