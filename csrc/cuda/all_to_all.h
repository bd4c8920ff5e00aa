// An all-to-all as a GPU runs it: one kernel on every rank reads the blocks for it in peers' memory. Blocks may differ
// in length, lie apart, and be empty.
//
//   tell each peer how long the block for it is and where it lies, and hear the same     then, for each piece:
//   stage the piece of every block, unless peers reach it where it lies
//   publish; wait for all; copy the piece of every block from peers
//
// No rank knows the lengths between two others. So each also tells its longest block, and the longest of all says into
// how many pieces all blocks are cut: a rank whose blocks are over goes on with pieces of nothing, so that progress
// stays the same everywhere. Blocks of threads and progress: pull_meeting.h. Ownership: none. Thread safety: one launch
// per rank at a time.
#pragma once

#include <cstddef>

#include "cuda/pull.h"

namespace ringlet::cuda {

struct ExchangeArgs : PullRanks {
  size_t size;         // bytes of an element
  size_t most_bytes;   // of a piece
  size_t least_bytes;  // ... if a block has as many
  // By rank: what this rank has for it, and gets from it.
  uint64_t sent[kMostRanks], received[kMostRanks];  // elements
  const std::byte* inputs[kMostRanks];
  std::byte* outputs[kMostRanks];
  uint64_t longest;  // of what this rank sends, in bytes
};

template <class Block>
class ExchangeInterpreter : PullMeeting<Block> {
  using Meeting = PullMeeting<Block>;

 public:
  RINGLET_BOTH ExchangeInterpreter(const ExchangeArgs& args, Block& block)
      : Meeting(args, block, args.received), args_(args) {}

  RINGLET_BOTH void run() {
    if (!Meeting::begin()) return;
    if (!meet() || !move_all() || (args_.call.in_heap != 0 && !Meeting::wait_for_all(epoch_, 0))) {
      return Meeting::give_up();
    }
    if (reads_in_place_) Meeting::look_back();
  }

 private:
  using Meeting::block_;
  using Meeting::epoch_;
  using Meeting::shared;

  /// Tells what is called, and finds out what the peers do and where their blocks are.
  RINGLET_BOTH bool meet() {
    if (epoch_ > 0 && !Meeting::wait_for_all(epoch_ - 1, 0)) return false;
    Meeting::to_compare_ = ~uint32_t{0};
    Meeting::tell_call([&](int q, size_t i) { return word(q, i); });
    Meeting::publish(Meeting::kSignatureReady);
    if (!Meeting::wait_for_all(epoch_, Meeting::kSignatureReady)) return false;
    uint64_t longest = 0;
    for (int q = 0; q < args_.world; ++q) {
      const PullCall& theirs = *Meeting::call(args_.rank, q);
      longest = theirs.output > longest ? theirs.output : longest;
      reads_in_place_ = reads_in_place_ || (q != args_.rank && theirs.in_heap != 0);
    }
    block_.one([&] {
      for (int q = 0; q < args_.world; ++q) {
        const PullCall& theirs = *Meeting::call(args_.rank, q);
        shared().inputs[q] = theirs.in_heap != 0 ? args_.heaps[q] + theirs.input : nullptr;
      }
      shared().inputs[args_.rank] = args_.inputs[args_.rank];
    });
    block_.together();
    const size_t share = packs((longest + static_cast<size_t>(args_.blocks) - 1) / static_cast<size_t>(args_.blocks));
    const size_t wanted = share > args_.least_bytes ? share : args_.least_bytes;
    width_ = wanted < args_.most_bytes ? wanted : args_.most_bytes;
    pieces_ = (longest + width_ - 1) / width_;
    return true;
  }

  RINGLET_BOTH static size_t packs(size_t bytes) { return (bytes + kPackBytes - 1) / kPackBytes * kPackBytes; }

  /// Of the call as rank q is told it. Its skew is that of where q's block goes here: q stages it as far past a pack's
  /// start.
  RINGLET_BOTH uint64_t word(int q, size_t i) const {
    switch (i * sizeof(uint64_t)) {
      case offsetof(PullCall, count): return args_.sent[q];
      case offsetof(PullCall, input): return number(args_.inputs[q]) - number(args_.heaps[args_.rank]);
      case offsetof(PullCall, output): return args_.longest;
      case offsetof(PullCall, skew): return past_pack(args_.outputs[q]);
      default: return reinterpret_cast<const uint64_t*>(&args_.call)[i];
    }
  }
  RINGLET_BOTH static uint64_t number(const std::byte* address) { return reinterpret_cast<uintptr_t>(address); }

  /// A block with no piece of its own tells and hears all the same.
  RINGLET_BOTH bool move_all() {
    const auto blocks = static_cast<size_t>(args_.blocks), mine = static_cast<size_t>(block_.index());
    for (size_t piece = mine; piece == mine || piece < pieces_; piece += blocks) {
      if (piece != mine && !Meeting::wait_for_all(epoch_ - 1, 0)) return false;
      begin_ = piece * width_;
      if (args_.call.in_heap == 0) {
        copy([&](int q) {
          return Copy{slot(args_.rank, q, shared().skews[q]), at(args_.inputs[q]), bytes(args_.sent[q], q)};
        });
      }
      Meeting::publish(Meeting::kReady);
      if (!Meeting::wait_for_all(epoch_, Meeting::kReady)) return false;
      copy([&](int q) { return Copy{at(args_.outputs[q]), source(q), rest(args_.received[q])}; });
      Meeting::publish(Meeting::kCompleted);
      ++epoch_;
    }
    return true;
  }

  struct Copy {
    std::byte* to;
    const std::byte* from;
    size_t bytes;
  };

  RINGLET_BOTH std::byte* at(const std::byte* block) const {
    return reinterpret_cast<std::byte*>(reinterpret_cast<uintptr_t>(block) + begin_);
  }
  /// Of a block, in this piece.
  RINGLET_BOTH size_t rest(uint64_t elements) const {
    const size_t all = elements * args_.size, after = all <= begin_ ? 0 : all - begin_;
    return after < width_ ? after : width_;
  }
  /// The block for this rank itself is not staged.
  RINGLET_BOTH size_t bytes(uint64_t elements, int q) const { return q == args_.rank ? 0 : rest(elements); }

  /// In rank `owner`'s region, what it has for rank `whose`.
  RINGLET_BOTH std::byte* slot(int owner, int whose, size_t skew) const {
    const PullLayout& layout = args_.layout;
    return args_.regions[owner] + layout.slot(block_.index(), epoch_, 0, static_cast<size_t>(whose), 0) + skew;
  }
  RINGLET_BOTH const std::byte* source(int q) const {
    const std::byte* block = shared().inputs[q];
    return block != nullptr ? at(block) : slot(q, args_.rank, past_pack(args_.outputs[q]));
  }

  /// For every rank, from the next one on, so that not all begin with the same; several side by side.
  template <class What>
  RINGLET_BOTH void copy(What what) {
    for (int first = 0; first < args_.world; first += kMostTogether) {
      const int left = args_.world - first, together = left < kMostTogether ? left : kMostTogether;
      block_.lanes(together, [&](int k, int lane, int) {
        if (lane != 0) return;
        const Copy copy = what((args_.rank + 1 + first + k) % args_.world);
        ReduceWork<kMostRanks>& work = shared().works[k];
        work.dst = copy.to;
        work.dst2 = nullptr;
        work.srcs[0] = copy.from;
        work.n = 1;
        work.count = copy.bytes;
        work.scaled_source = -1;
        work.divisor = 1;
        find_packs(work, Bytes<1>(), past_pack(copy.to) == past_pack(copy.from));
      });
      block_.together();
      block_.split(together,
                   [&](int k, size_t thread, size_t threads) { copy_as_thread(shared().works[k], thread, threads); });
      block_.together();  // before the works are filled again
    }
  }

  const ExchangeArgs& args_;
  size_t begin_ = 0, width_ = 0, pieces_ = 0;  // bytes
  bool reads_in_place_ = false;
};

}  // namespace ringlet::cuda
