// The one-shot all-reduce of small messages without a meeting: what a rank pushes carries its own flag.
//
// Every rank writes its message into every peer's region, 4 bytes and a flag of 4 bytes in each store of 8, which no
// reader sees by halves. A reader looks at a word until the flag is the call's, so a message costs one way to a peer and
// no fence. Then each rank reduces all messages in rank order, as one_shot does, with the same bits. It moves twice the
// bytes, so it is for few of them. Source: what NCCL's protocol LL does. This has never run on a GPU.
//
// A block of threads moves the same kPieceBytes of every message, and counts its calls itself, on the device. Its lines
// of words take turns by the parity of that number: who has a peer's words of one call knows that the peer has read all
// of the call before the last. Before its words a block sends what its rank calls; who gets another call ends before it
// writes a result. Ends and budgets: pull_meeting.h.
// Ownership: none. Thread safety: one launch per rank at a time.
#pragma once

#include "cuda/pull.h"

namespace ringlet::cuda {

/// In a region, from `start` on: the number of the last call of each block, then lines of words, then room for what came.
struct LowLayout {
  static constexpr size_t kPieceBytes = size_t{8} << 10;            // of a message, for a block
  static constexpr size_t kHead = 6;                                // words before the message's: what is called
  static constexpr size_t kWords = kHead + kPieceBytes / 4;         // of a line
  static constexpr size_t kRoom = kPieceBytes + PullLayout::kLine;  // and as far past a pack's start as the tensor
  static constexpr int kMostBlocks = 8;
  static constexpr size_t kBudget = size_t{4} << 20;

  size_t start;
  int blocks;
  int ranks;

  /// As many blocks as there is room for.
  static constexpr int blocks_for(int most, int ranks) {
    const auto room =
        static_cast<int>(kBudget / (static_cast<size_t>(ranks) * (2 * kWords * sizeof(uint64_t) + kRoom)));
    const int least = room < kMostBlocks ? room : kMostBlocks;
    return most < least ? most : least;
  }
  RINGLET_BOTH size_t number(int block) const { return start + static_cast<size_t>(block) * sizeof(uint64_t); }
  RINGLET_BOTH size_t line(int block, uint64_t number, int from) const {
    const size_t before = (static_cast<size_t>(block) * 2 + (number & 1)) * static_cast<size_t>(ranks);
    return start + PullLayout::kLine + (before + static_cast<size_t>(from)) * kWords * sizeof(uint64_t);
  }
  RINGLET_BOTH size_t room(int block, int from) const {
    const size_t before = static_cast<size_t>(block) * static_cast<size_t>(ranks) + static_cast<size_t>(from);
    return (line(blocks, 0, 0) + PullLayout::kLine - 1) / PullLayout::kLine * PullLayout::kLine + before * kRoom;
  }
  static constexpr size_t bytes() { return kBudget + 2 * PullLayout::kLine; }
};

/// Stands for the phase in the failure of a block that got another call: both are in its line of words.
inline constexpr uint32_t kLowPhase = 0xffffffff;

struct LowArgs : PullRanks {
  LowLayout low;
  const std::byte* input;
  std::byte* output;
  size_t bytes;
  int divisor;
};

template <class E, class Op, class Block>
class LowInterpreter : PullMeeting<Block> {
  using Meeting = PullMeeting<Block>;

 public:
  RINGLET_BOTH LowInterpreter(const LowArgs& args, Block& block) : Meeting(args, block), args_(args) {}

  RINGLET_BOTH void run() {
    if (!Meeting::begin()) return;
    uint64_t* const last = word_at(args_.rank, args_.low.number(block_.index()));
    number_ = block_.peek(last) + 1;
    begin_ = static_cast<size_t>(block_.index()) * LowLayout::kPieceBytes;
    const size_t rest = args_.bytes - begin_;
    bytes_ = rest < LowLayout::kPieceBytes ? rest : LowLayout::kPieceBytes;
    words_ = LowLayout::kHead + (bytes_ + 3) / 4;
    // What is written over may still be read of the call before the last. This looks at this rank's own memory only.
    if (epoch_ > 0 && !Meeting::wait_for_all(epoch_ - 1, 0)) return Meeting::give_up();
    push();
    // For a peer whose call is none of these: it compares.
    const auto* told = reinterpret_cast<const uint64_t*>(&args_.call);
    Meeting::tell_call([=](int, size_t i) { return told[i]; });
    Meeting::publish(Meeting::kReady);
    if (!take()) return Meeting::give_up();
    block_.one([&] { block_.put(last, number_); });  // all threads have read it before take()'s barrier
    reduce();
    Meeting::publish(Meeting::kCompleted);
  }

 private:
  using Meeting::block_;
  using Meeting::epoch_;
  using Meeting::shared;

  RINGLET_BOTH uint64_t* word_at(int rank, size_t offset) const {
    return reinterpret_cast<uint64_t*>(args_.regions[rank] + offset);
  }
  RINGLET_BOTH uint64_t* line(int at, int from) const {
    return word_at(at, args_.low.line(block_.index(), number_, from));
  }
  RINGLET_BOTH uint64_t flagged(uint32_t value) const { return number_ << 32 | value; }

  /// Of what is called.
  RINGLET_BOTH uint32_t head(size_t i) const {
    const uint64_t word = i < 2 ? args_.call.signature : i < 4 ? args_.call.count : args_.call.sequence;
    return static_cast<uint32_t>(i % 2 == 0 ? word : word >> 32);
  }
  /// The host does not compare how many calls were made before, but tells it.
  RINGLET_BOTH bool expected(size_t i, uint32_t value) const { return i >= 4 || value == head(i); }

  /// 4 bytes, fewer at the end; one by one where a tensor does not begin at a multiple of 4.
  RINGLET_BOTH static uint32_t gather(const std::byte* from, size_t count) {
    if (count >= 4 && reinterpret_cast<uintptr_t>(from) % 4 == 0) return *reinterpret_cast<const uint32_t*>(from);
    uint32_t value = 0;
    for (size_t i = 0; i < 4 && i < count; ++i) value |= static_cast<uint32_t>(from[i]) << 8 * i;
    return value;
  }
  RINGLET_BOTH static void scatter(std::byte* to, uint32_t value, size_t count) {
    if (count >= 4 && reinterpret_cast<uintptr_t>(to) % 4 == 0) {
      *reinterpret_cast<uint32_t*>(to) = value;
    } else {
      for (size_t i = 0; i < 4 && i < count; ++i) to[i] = static_cast<std::byte>(value >> 8 * i);
    }
  }

  RINGLET_BOTH void push() {
    block_.each([&](size_t thread, size_t threads) {
      for (size_t i = thread; i < words_; i += threads) {
        const size_t place = (i - LowLayout::kHead) * 4;
        const bool is_head = i < LowLayout::kHead;
        const uint64_t word = flagged(is_head ? head(i) : gather(args_.input + begin_ + place, bytes_ - place));
        for (int k = is_head ? 0 : 1; k < args_.world; ++k) {
          block_.put(line((args_.rank + k) % args_.world, args_.rank) + i, word);
        }
      }
    });
  }

  /// Brings what peers have pushed to where it can be reduced. False where a wait was over, or a call is another: that
  /// shows before the messages, of which a peer may have pushed less than this rank waits for.
  RINGLET_BOTH bool take() {
    const auto place = [](size_t i) { return (i - LowLayout::kHead) * 4; };
    return take_words(0, LowLayout::kHead, [&](int, size_t i, uint32_t value) { return expected(i, value); }) &&
           take_words(LowLayout::kHead, words_, [&](int q, size_t i, uint32_t value) {
             scatter(receive_buffer(q) + place(i), value, bytes_ - place(i));
             return true;
           });
  }

  /// use(q, i, value): of word i of rank q; false where that rank calls something else.
  template <class Use>
  RINGLET_BOTH bool take_words(size_t first, size_t end, Use use) {
    const PullWatch watch{args_.call, args_.budget, Meeting::end_of(args_.rank), args_.host};
    bool bad = false;
    block_.each([&](size_t thread, size_t threads) {
      for (int k = 1; k < args_.world && !bad; ++k) {
        const int q = (args_.rank + k) % args_.world;
        const uint64_t failure = pull_failure(args_.rank, q, block_.index(), Meeting::kReady);
        for (size_t i = first + thread; i < end && !bad; i += threads) {
          uint64_t word = 0;
          bad = !block_.flagged(line(args_.rank, q) + i, static_cast<uint32_t>(number_), watch, failure, &word);
          if (bad || use(q, i, static_cast<uint32_t>(word))) continue;
          bad = true;
          fail<Block>(watch, pull_failure(args_.rank, q, block_.index(), kLowPhase) | kOtherCall);
        }
      }
    });
    return !block_.any(bad);
  }

  /// As far past a pack's start as what is made of it, so that packs meet packs.
  RINGLET_BOTH std::byte* receive_buffer(int q) const {
    return args_.regions[args_.rank] + args_.low.room(block_.index(), q) + past_pack(args_.output + begin_);
  }

  RINGLET_BOTH void reduce() {
    block_.one([&] {
      ReduceWork<kMostRanks>& work = shared().works[0];
      bool alike = true;
      for (int q = 0; q < args_.world; ++q) {
        work.srcs[q] = q == args_.rank ? args_.input + begin_ : receive_buffer(q);
        alike = alike && past_pack(work.srcs[q]) == past_pack(args_.output + begin_);
      }
      work.dst = args_.output + begin_;
      work.dst2 = nullptr;
      work.n = args_.world;
      work.scaled_source = -1;
      work.divisor = args_.divisor;
      work.count = bytes_ / sizeof(typename E::Bits);
      find_packs(work, Bytes<sizeof(typename E::Bits)>(), alike);
    });
    block_.together();
    block_.each([&](size_t thread, size_t threads) {
      reduce_as_thread<E, Op, kMostRanks, /*kPair=*/false, kPacksAtOnce<E, Op> / 2>(shared().works[0], thread, threads);
    });
  }

  const LowArgs& args_;
  uint64_t number_ = 0;  // of this block's call
  size_t begin_ = 0, bytes_ = 0, words_ = 0;
};

}  // namespace ringlet::cuda
