// The one-shot all-reduce of small messages without a meeting: what a rank pushes carries its own flag.
//
// Every rank writes its message into every peer's region, in packets of 16 bytes: twice 4 bytes and a flag of 4, and no
// reader sees either half divided. A reader loads all peers' packets at once, looks again until each flag is the call's,
// and adds in registers, in rank order, as one_shot does, with the same bits. So a message costs one way to a peer, and
// no fence. It moves twice the bytes, so it is for few of them. Source: what NCCL's protocol LL does. It has never run.
//
// A block of threads moves one piece of every message, and counts its calls itself, on the device. Its lines take turns
// by the parity of that number: who has a peer's words of one call knows that the peer has read all of the call before.
// A line begins with what its rank calls; who gets another call ends before it writes a result. A block that waits for
// long tells its call to peers whose kernel is another one: they compare. Ends and budgets: pull_meeting.h.
// Ownership: none. Thread safety: one launch per rank at a time.
#pragma once

#include "cuda/pull.h"

#if defined(__CUDACC__)
#define RINGLET_ROLL _Pragma("unroll 1")  // what is rarely run should not keep a launch waiting for its instructions
#else
#define RINGLET_ROLL
#endif

namespace ringlet::cuda {

/// In a region, from `start` on: the number of the last call of each block, then lines of words: 4 bytes and their flag.
struct LowLayout {
  static constexpr size_t kHead = 6;                           // words before the message's: what is called
  static constexpr size_t kMostBytes = size_t{64} << 10;       // of a message
  static constexpr size_t kLeastPieceBytes = size_t{1} << 10;  // of a block, where there are more
  static constexpr size_t kBudget = size_t{4} << 20;           // of the lines
  static constexpr size_t kPacketBytes = 8;                    // of a message, in two words

  size_t start;
  int blocks;
  int ranks;
  size_t words;  // of a line

  static constexpr LowLayout make(size_t start, int blocks, int ranks) {
    const auto lines = 2 * static_cast<size_t>(blocks) * static_cast<size_t>(ranks);
    const size_t share = (kMostBytes + static_cast<size_t>(blocks) - 1) / static_cast<size_t>(blocks);
    const size_t wanted = kHead + (share + kPacketBytes - 1) / kPacketBytes * 2;
    const size_t room = kBudget / lines / (2 * sizeof(uint64_t)) * 2;  // whole packets
    return {start, blocks, ranks, wanted < room ? wanted : room};
  }
  /// Of a message, for one block and for all.
  constexpr size_t piece_bytes() const { return (words - kHead) * 4; }
  constexpr size_t most_bytes() const {
    const size_t all = piece_bytes() * static_cast<size_t>(blocks);
    return all < kMostBytes ? all : kMostBytes;
  }
  RINGLET_BOTH size_t number(int block) const { return start + static_cast<size_t>(block) * sizeof(uint64_t); }
  RINGLET_BOTH size_t line(int block, uint64_t number, int from) const {
    const size_t before = (static_cast<size_t>(block) * 2 + (number & 1)) * static_cast<size_t>(ranks);
    return start + numbers() + (before + static_cast<size_t>(from)) * words * sizeof(uint64_t);
  }
  constexpr size_t bytes() const { return numbers() + kBudget; }

 private:
  RINGLET_BOTH constexpr size_t numbers() const {
    return (static_cast<size_t>(blocks) * sizeof(uint64_t) + PullLayout::kLine - 1) / PullLayout::kLine *
           PullLayout::kLine;
  }
};

/// Stands for the phase in the failure of a block that got another call: both are in its lines.
inline constexpr uint32_t kLowPhase = 0xffffffff;

struct LowArgs : PullRanks {
  LowLayout low;
  const std::byte* input;
  std::byte* output;
  size_t bytes;
  size_t piece;  // bytes of a block
  int divisor;
};

template <class E, class Ops, class Block>
class LowInterpreter : PullMeeting<Block> {
  using Meeting = PullMeeting<Block>;

 public:
  RINGLET_BOTH LowInterpreter(const LowArgs& args, Block& block) : Meeting(args, block), args_(args) {}

  RINGLET_BOTH void run() {
    uint64_t* const last = word_at(args_.rank, args_.low.number(block_.index()));
    number_ = block_.peek(last) + 1;
    if (!Meeting::begin()) return;
    begin_ = static_cast<size_t>(block_.index()) * args_.piece;
    const size_t rest = args_.bytes - begin_;
    bytes_ = rest < args_.piece ? rest : args_.piece;
    packets_ = kHead + (bytes_ + LowLayout::kPacketBytes - 1) / LowLayout::kPacketBytes;
    push();
    if (!combine()) return Meeting::give_up();
    block_.one([&] { block_.put(last, number_); });
    // Whoever waits for it reads nothing that this call wrote, and what it may write over was read by kernels before.
    block_.each([&](size_t thread, size_t threads) {
      for (size_t q = thread; q < static_cast<size_t>(args_.world); q += threads) {
        block_.put(Meeting::progress(static_cast<int>(q), args_.rank), (epoch_ << 16) + Meeting::kCompleted);
      }
    });
  }

 private:
  using Meeting::block_;
  using Meeting::epoch_;

  static constexpr size_t kHead = LowLayout::kHead / 2;           // packets
  static constexpr int kAtOnce = 8;                               // peers whose packets are on their way together
  static constexpr unsigned kTellAt = 64 * Block::kTurnsPerLook;  // turns of a wait
  static constexpr size_t kSequence = 2;                          // of the packets of what is called

  using Packet = Values<E, Ops, LowLayout::kPacketBytes / sizeof(typename E::Bits)>;

  RINGLET_BOTH uint64_t* word_at(int rank, size_t offset) const {
    return reinterpret_cast<uint64_t*>(args_.regions[rank] + offset);
  }
  RINGLET_BOTH uint64_t* packet_at(int at, int from, size_t i) const {
    return word_at(at, args_.low.line(block_.index(), number_, from)) + 2 * i;
  }
  RINGLET_BOTH uint64_t flagged(uint64_t value) const { return number_ << 32 | static_cast<uint32_t>(value); }
  RINGLET_BOTH static size_t place(size_t i) { return (i - kHead) * LowLayout::kPacketBytes; }

  /// Up to 8 bytes; one by one at the end, and where a tensor does not begin at a multiple of 4.
  RINGLET_BOTH static uint64_t gather(const std::byte* from, size_t count) {
    if (count >= LowLayout::kPacketBytes && reinterpret_cast<uintptr_t>(from) % 4 == 0) {
      const auto* words = global(reinterpret_cast<const uint32_t*>(from));
      return static_cast<uint64_t>(words[1]) << 32 | words[0];
    }
    uint64_t value = 0;
    RINGLET_ROLL
    for (size_t i = 0; i < LowLayout::kPacketBytes && i < count; ++i) value |= static_cast<uint64_t>(from[i]) << 8 * i;
    return value;
  }
  RINGLET_BOTH static void scatter(std::byte* to, uint64_t value, size_t count) {
    if (count >= LowLayout::kPacketBytes && reinterpret_cast<uintptr_t>(to) % 4 == 0) {
      auto* words = global(reinterpret_cast<uint32_t*>(to));
      words[0] = static_cast<uint32_t>(value);
      words[1] = static_cast<uint32_t>(value >> 32);
      return;
    }
    RINGLET_ROLL
    for (size_t i = 0; i < LowLayout::kPacketBytes && i < count; ++i) to[i] = static_cast<std::byte>(value >> 8 * i);
  }

  /// This rank's packet: of what is called, then of the message.
  RINGLET_BOTH uint64_t called(size_t i) const {
    return i == 0 ? args_.call.signature : i == 1 ? args_.call.count : args_.call.sequence;
  }
  RINGLET_BOTH uint64_t own(size_t i) const {
    return i < kHead ? called(i) : gather(args_.input + begin_ + place(i), bytes_ - place(i));
  }

  RINGLET_BOTH void push() {
    block_.each([&](size_t thread, size_t threads) {
      for (size_t i = thread; i < packets_; i += threads) {
        const uint64_t value = own(i);
        RINGLET_ROLL
        for (int k = i < kHead ? 0 : 1; k < args_.world; ++k) {  // the host reads what this rank calls, too
          const int q = args_.rank + k < args_.world ? args_.rank + k : args_.rank + k - args_.world;
          block_.put_packet(packet_at(q, args_.rank, i), flagged(value), flagged(value >> 32));
        }
      }
    });
  }

  /// False where a wait was over, or a call is another. What is called is in the first packets that the threads take, so
  /// nothing is written before all threads have those.
  RINGLET_BOTH bool combine() {
    for (size_t begin = 0; begin < packets_; begin += Block::threads()) {
      uint64_t sums[Block::kThreadsInOne];
      bool bad = false;
      block_.each([&](size_t thread, size_t) {
        const size_t i = begin + thread;
        if (i < packets_ && !bad) bad = !take(i, sums[thread % Block::kThreadsInOne]);
      });
      if (block_.any(bad)) return false;
      block_.each([&](size_t thread, size_t) {
        const size_t i = begin + thread;
        if (i < kHead || i >= packets_) return;
        scatter(args_.output + begin_ + place(i), sums[thread % Block::kThreadsInOne], bytes_ - place(i));
      });
    }
    return true;
  }

  /// The sum of all ranks' packets; of what is called, none.
  RINGLET_BOTH bool take(size_t i, uint64_t& sum) {
    Packet sums;
    RINGLET_ROLL
    for (int from = 0; from < args_.world; from += kAtOnce) {
      uint64_t values[kAtOnce];
      if (!receive(i, from, values)) return false;
      RINGLET_UNROLL
      for (int k = 0; k < kAtOnce; ++k) {
        if (from + k >= args_.world) continue;
        if (i < kHead) {
          // The host does not compare how many calls were made before, but tells it.
          if (i == kSequence || values[k] == called(i)) continue;
          fail<Block>(watch(), failure_for(from + k, kLowPhase) | kOtherCall);
          return false;
        }
        typename E::Bits bits[LowLayout::kPacketBytes / sizeof(typename E::Bits)];
        memcpy(bits, &values[k], sizeof bits);
        Packet next;
        next.unpack(bits);
        if (from + k == 0) {
          sums = next;
        } else {
          sums.combine(ReduceOp::sum, next);
        }
      }
    }
    if (i < kHead) return true;
    if (args_.divisor != 1) sums.divide(args_.divisor);
    typename E::Bits bits[LowLayout::kPacketBytes / sizeof(typename E::Bits)];
    sums.pack(bits);
    memcpy(&sum, bits, sizeof sum);
    return true;
  }

  /// Packet i of the ranks from `from` on, when all have come. False where the wait was over.
  RINGLET_BOTH bool receive(size_t i, int from, uint64_t (&values)[kAtOnce]) {
    const uint64_t mine = own(i);
    uint64_t start = 0;
    for (unsigned turn = 0;; ++turn) {
      uint64_t low[kAtOnce], high[kAtOnce];
      RINGLET_UNROLL
      for (int k = 0; k < kAtOnce; ++k) {
        low[k] = flagged(mine);
        high[k] = flagged(mine >> 32);
        if (from + k < args_.world && from + k != args_.rank) {
          block_.peek_packet(packet_at(args_.rank, from + k, i), low[k], high[k]);
        }
      }
      int missing = -1;
      RINGLET_UNROLL
      for (int k = 0; k < kAtOnce; ++k) {
        const bool came = static_cast<uint32_t>(low[k] >> 32) == static_cast<uint32_t>(number_) &&
                          static_cast<uint32_t>(high[k] >> 32) == static_cast<uint32_t>(number_);
        if (!came) missing = from + k;
        values[k] = high[k] << 32 | static_cast<uint32_t>(low[k]);
      }
      if (missing < 0) return true;
      if (turn % Block::kTurnsPerLook == Block::kTurnsPerLook - 1 && !waits_on(missing, start)) return false;
      if (i == 0 && turn >= kTellAt && turn % Block::kTurnsPerLook == 0) tell();
    }
  }

  RINGLET_BOTH PullWatch watch() const { return {args_.call, args_.budget, Meeting::end_of(args_.rank), args_.host}; }
  RINGLET_BOTH uint64_t failure_for(int peer, uint32_t phase) const {
    return pull_failure(args_.rank, peer, block_.index(), phase);
  }

  /// Looks whether the wait is over. start: when it looked first; 0: it has not.
  RINGLET_BOTH bool waits_on(int peer, uint64_t& start) {
    const PullWatch watching = watch();
    const uint64_t now = block_.nanoseconds();
    if (start == 0) start = now;
    const uint64_t told = block_.peek(&watching.end->told);
    const bool on = told == 0 && block_.peek(&watching.end->own) == 0 && block_.peek(&watching.host->ended) == 0 &&
                    static_cast<int64_t>(now - start) <= static_cast<int64_t>(watching.budget);
    if (on) {
      block_.pause();
    } else {
      const uint64_t failure = failure_for(peer, Meeting::kReady);
      fail<Block>(watching, told != 0 ? pull_failure_of(rank_of(told), failure) : failure);
    }
    return on;
  }

  /// To peers whose kernel may wait for this rank's progress. Who has not ended the call before the last still compares
  /// what that one was, which lies in the same place. One thread does, so that no other need come.
  RINGLET_BOTH void tell() {
    RINGLET_ROLL
    for (int q = 0; q < args_.world; ++q) {
      const bool ended = epoch_ == 0 || block_.load(Meeting::progress(args_.rank, q)) >= (epoch_ - 1) << 16;
      if (!ended || (told_ >> q & 1) != 0) continue;
      *Meeting::call(q, args_.rank) = args_.call;
      block_.store(Meeting::progress(q, args_.rank), (epoch_ << 16) + Meeting::kReady);
      told_ |= uint32_t{1} << q;
    }
  }

  const LowArgs& args_;
  uint64_t number_ = 0;  // of this block's call
  uint32_t told_ = 0;    // a bit for each peer
  size_t begin_ = 0, bytes_ = 0, packets_ = 0;
};

}  // namespace ringlet::cuda
