// The sum of all ranks' messages by the switch between their GPUs (NVLS): multicast memory adds and stores for all.
//
// All ranks' own memory is bound to one multicast object. A load-reduce from the object's address adds what lies there
// in every rank's memory; a store to it goes to every rank's. A block of threads copies a piece of its rank's input into
// its part of the rank's own memory. When all have, it load-reduces its rank's share of the piece and stores the sums for
// all ranks. When all have done that, it copies the sums to the output. The switch adds in an order of its own, float16
// and bfloat16 in float32, rounded once. One rank makes each sum, so all ranks have the same bits.
// Source: the multimem instructions of PTX; NCCL's algorithm NVLS. This has never run on a GPU.
// `Block` (pull_meeting.h) also has load_sum and store_for_all, and its publish() orders what is stored by one address of
// the memory before what is loaded by the other: on the device in multicast.cu.
// Ownership: none. Thread safety: one launch per rank at a time.
#pragma once

#include "cuda/pull.h"

namespace ringlet::cuda {

struct MulticastArgs : PullRanks {
  std::byte* all;  // the multicast object; only load_sum and store_for_all reach it
  std::byte* own;  // this rank's memory that is bound to it
  const std::byte* input;
  std::byte* output;
  size_t bytes;
  size_t width;  // of a piece, in whole packs; a block's part of the memory is as long
  size_t pieces;
};

template <class E, class Block>
class MulticastInterpreter : PullMeeting<Block> {
  using Meeting = PullMeeting<Block>;

 public:
  RINGLET_BOTH MulticastInterpreter(const MulticastArgs& args, Block& block) : Meeting(args, block), args_(args) {}

  RINGLET_BOTH void run() {
    if (!Meeting::begin()) return;
    const auto blocks = static_cast<size_t>(args_.blocks), mine = static_cast<size_t>(block_.index());
    for (size_t piece = mine; piece < args_.pieces; piece += blocks) {
      if (!run_piece(piece * args_.width, piece == mine)) return Meeting::give_up();
      ++epoch_;
    }
  }

 private:
  using Meeting::block_;
  using Meeting::epoch_;
  using Meeting::shared;

  // All ranks are through with a piece's sums, in terms of a plan's rounds: after its first.
  static constexpr uint32_t kSummed = Meeting::kReady + 1;
  static constexpr int kAtOnce = 4;  // packs of a thread: each is a way to the switch and back

  RINGLET_BOTH bool run_piece(size_t begin, bool first) {
    const size_t rest = args_.bytes - begin, bytes = rest < args_.width ? rest : args_.width;
    const size_t place = static_cast<size_t>(block_.index()) * args_.width;
    if (first) {
      // A peer may still compare what the call before the last told it.
      if (epoch_ > 0 && !Meeting::wait_for_all(epoch_ - 1, 0)) return false;
      Meeting::to_compare_ = ~uint32_t{0};
      const auto* told = reinterpret_cast<const uint64_t*>(&args_.call);
      Meeting::tell_call([=](int, size_t i) { return told[i]; });
    }
    copy(args_.input + begin, args_.own + place, bytes);
    Meeting::publish(Meeting::kReady);
    if (!Meeting::wait_for_all(epoch_, Meeting::kReady)) return false;
    sum(args_.all + place, (bytes + kPackBytes - 1) / kPackBytes);
    Meeting::publish(Meeting::kCompleted);
    // From here on peers read and write this rank's memory no more, so the next piece may lie there.
    if (!Meeting::wait_for_all(epoch_, kSummed)) return false;
    copy(args_.own + place, args_.output + begin, bytes);
    block_.together();  // before the work is filled again
    return true;
  }

  RINGLET_BOTH void copy(const std::byte* from, std::byte* to, size_t bytes) {
    block_.one([&] {
      ReduceWork<kMostRanks>& work = shared().works[0];
      work.srcs[0] = from;
      work.dst = to;
      work.dst2 = nullptr;
      work.n = 1;
      work.count = bytes;
      find_packs(work, Bytes<1>(), past_pack(from) == past_pack(to));
    });
    block_.together();
    block_.each([&](size_t thread, size_t threads) { copy_as_thread(shared().works[0], thread, threads); });
  }

  /// This rank's share of the packs. The last one may have more than the message: nobody copies that.
  RINGLET_BOTH void sum(std::byte* at, size_t packs) {
    const size_t share = (packs + static_cast<size_t>(args_.world) - 1) / static_cast<size_t>(args_.world);
    const size_t first = share * static_cast<size_t>(args_.rank), end = first + share < packs ? first + share : packs;
    block_.each([&](size_t thread, size_t threads) {
      size_t i = first + thread;
      for (; i + (kAtOnce - 1) * threads < end; i += kAtOnce * threads) sum_packs<kAtOnce>(at, i, threads);
      for (; i < end; i += threads) sum_packs<1>(at, i, threads);
    });
  }

  template <int kPacks>
  RINGLET_BOTH void sum_packs(std::byte* at, size_t first, size_t apart) {
    Pack sums[kPacks];
    RINGLET_UNROLL
    for (int p = 0; p < kPacks; ++p) sums[p] = block_.template load_sum<E>(at + (first + p * apart) * kPackBytes);
    RINGLET_UNROLL
    for (int p = 0; p < kPacks; ++p) block_.store_for_all(at + (first + p * apart) * kPackBytes, sums[p]);
  }

  const MulticastArgs& args_;
};

}  // namespace ringlet::cuda
