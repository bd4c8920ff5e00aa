// What the blocks of a rank's kernel say to their peers on other ranks, and hear of them: progress, calls, and ends.
//
// A block waits only for the blocks of its number on other ranks. Its progress is one 64-bit word, as in
// transport/control.h: epoch << 16 | phase, one epoch a piece. Data is pulled, progress is pushed: a block writes it into
// all ranks' regions, and a waiting block looks at its own. The word lives on the device, so a replayed launch goes on
// from where the last one ended. Beside it lies the call: peers compare it and learn where the tensors are. Every wait
// has a budget. A block whose wait is over, or whose peer calls something else, writes that into its own region's first
// line, then into its peers', and ends; so do the others.
// Ownership: none. Thread safety: one launch per rank at a time; in other ranks' memory a kernel writes only its part.
// `Block` says what a block of threads is: on the device in block.cuh, on the host in tests/cpp/host_block.h.
#pragma once

#include "cuda/reduce.h"

namespace ringlet::cuda {

inline constexpr int kMostRanks = 32;

/// What a rank calls, for peers to compare and to find its tensors: bytes from its heap's start, moved so that chunk 0
/// would lie there.
struct PullCall {
  uint64_t signature;  // engine/call.h packs it
  uint64_t count;      // of an exchange: elements for the rank that is told
  uint64_t sequence;
  uint64_t input;
  uint64_t output;
  uint64_t in_heap;  // 1: peers can read them there
  uint64_t skew;     // how far its tensors begin past a pack's start; what it stages lies as far past one
};

/// How a rank's calls came to their end: pull_failure()s, or 0.
struct PullEnd {
  uint64_t own;   // the first of its blocks' that gave up; the host's, too
  uint64_t told;  // the last of its peers' that did
};

/// In the host's memory, which kernels reach: reading it takes the host no call to the device.
struct PullHost {
  PullEnd end;     // of the rank's calls, as far as its own kernels know
  uint64_t ended;  // not 0: the host has ended the rank's calls
};

/// A region: its PullEnd, an incoming area for each block, then for each block two areas by the parity of the epoch, in
/// which its staging buffers are. An incoming area has all ranks' progress, then what they call. Areas are the same for
/// all calls: a peer may still read what the call before left in one.
struct PullLayout {
  static constexpr size_t kLine = 128;
  int blocks;  // that a kernel has at most
  int ranks;
  size_t area_bytes;  // a multiple of what a pack has
  size_t slot_bytes;  // of one chunk's piece in one staging buffer

  RINGLET_BOTH constexpr size_t incoming(int block) const {
    const size_t bytes = static_cast<size_t>(ranks) * (sizeof(uint64_t) + 2 * sizeof(PullCall));
    return kLine + static_cast<size_t>(block) * ((bytes + kLine - 1) / kLine * kLine);
  }
  RINGLET_BOTH size_t progress(int block, int from) const {
    return incoming(block) + static_cast<size_t>(from) * sizeof(uint64_t);
  }
  /// By the parity of the call's first epoch: a rank begins none before all have ended the one before the last.
  RINGLET_BOTH size_t call(int block, int from, uint64_t epoch) const {
    return progress(block, ranks) + (static_cast<size_t>(from) * 2 + (epoch & 1)) * sizeof(PullCall);
  }
  RINGLET_BOTH constexpr size_t staging() const { return incoming(blocks); }
  /// An area has two staging buffers of `parts` slots.
  RINGLET_BOTH size_t slot(int block, uint64_t epoch, int buffer, size_t chunk, size_t parts) const {
    const size_t area = static_cast<size_t>(block) * 2 + (epoch & 1);
    return staging() + area * area_bytes + (static_cast<size_t>(buffer) * parts + chunk) * slot_bytes;
  }
};

/// Of a kernel's arguments, what its meetings with other ranks need.
struct PullRanks {
  PullCall call;
  int rank;
  int world;
  int blocks;  // of this kernel
  PullLayout layout;
  PullHost* host;
  uint64_t budget;  // of a wait, in the block's unit of time
  std::byte* regions[kMostRanks];
  std::byte* heaps[kMostRanks];
};

/// The rank that gave up, and which block was waiting for which peer's phase then: 1 << 63 | kind << 62 | rank << 54 |
/// peer << 46 | block << 32 | phase. The kind is 1 where the peer calls something else. A rank as its own peer: its
/// host ended it.
RINGLET_BOTH uint64_t pull_failure(int rank, int peer, int block, uint32_t phase) {
  return uint64_t{1} << 63 | static_cast<uint64_t>(rank) << 54 | static_cast<uint64_t>(peer) << 46 |
         static_cast<uint64_t>(block) << 32 | phase;
}
inline constexpr uint64_t kOtherCall = uint64_t{1} << 62;

/// What a block was waiting for, since that rank gave up.
RINGLET_BOTH uint64_t pull_failure_of(int rank, uint64_t waited) {
  return (waited & ~(uint64_t{0xff} << 54)) | static_cast<uint64_t>(rank) << 54;
}
RINGLET_BOTH int rank_of(uint64_t failure) { return static_cast<int>(failure >> 54 & 0xff); }

/// What one thread of a block waits for.
struct PullWait {
  const uint64_t* word;
  uint64_t target;
  const PullCall* call;  // to compare then; null: not now
  uint64_t count;        // ... with this one
  uint8_t* skew;         // which the call tells
  uint64_t failure;
};

/// Of a peer that calls something else. The count that was awaited, as far as there is room, stands where the phase did.
RINGLET_BOTH uint64_t other_call(const PullWait& wait) {
  return wait.failure >> 32 << 32 | kOtherCall | static_cast<uint32_t>(wait.count);
}

/// What ends a wait otherwise.
struct PullWatch {
  const PullCall& own;
  uint64_t budget;
  PullEnd* end;
  PullHost* host;
};

/// Of a peer that has come: false where it calls something else.
RINGLET_BOTH bool calls_the_same(const PullWait& wait, const PullCall& own) {
  if (wait.call == nullptr) return true;
  *wait.skew = static_cast<uint8_t>(wait.call->skew);
  return wait.call->signature == own.signature && wait.call->count == wait.count;
}

template <class Block>
RINGLET_BOTH void fail(const PullWatch& watch, uint64_t failure) {
  if (Block::claim(&watch.end->own, failure)) Block::store(&watch.host->end.own, failure);
}

/// What a kernel's block does alike whatever it moves. `Block::shared()` has `skews`, by rank.
template <class Block>
class PullMeeting {
 public:
  /// counts: what each peer must have called; null: ranks.call.count of all.
  RINGLET_BOTH PullMeeting(const PullRanks& ranks, Block& block, const uint64_t* counts = nullptr)
      : ranks_(ranks), block_(block), counts_(counts) {}

 protected:
  static constexpr uint32_t kSignatureReady = 1, kReady = 2, kCompleted = uint32_t{1} << 16;

  struct Awaited {
    int peer;
    uint32_t phase;
  };

  /// False where a call before did not end: its epochs are no longer its peers'.
  RINGLET_BOTH bool begin() {
    PullEnd* const end = end_of(ranks_.rank);
    // Three ways to memory, side by side.
    const uint64_t own = block_.peek(&end->own), told = block_.peek(&end->told);
    const uint64_t before = block_.peek(progress(ranks_.rank, ranks_.rank));
    if (block_.any((own | told) != 0)) return tell_host(own, told), false;
    epoch_ = before >> 16;
    return true;
  }

  // What has come from a rank, in another's incoming area or in this one's.
  RINGLET_BOTH uint64_t* progress(int at, int from) const {
    return reinterpret_cast<uint64_t*>(ranks_.regions[at] + ranks_.layout.progress(block_.index(), from));
  }
  RINGLET_BOTH PullCall* call(int at, int from) const {
    return reinterpret_cast<PullCall*>(ranks_.regions[at] + ranks_.layout.call(block_.index(), from, epoch_));
  }

  RINGLET_BOTH PullEnd* end_of(int rank) const { return reinterpret_cast<PullEnd*>(ranks_.regions[rank]); }

  /// This rank's tensors are its caller's again when the kernel ends, though peers may still be reading them: they are
  /// told before. Of calls that differ they find out themselves, before they read.
  RINGLET_BOTH void give_up() {
    const uint64_t why = block_.load(&end_of(ranks_.rank)->own);
    if ((why & kOtherCall) == 0) {
      block_.publish(ranks_.world, [&](int q) { return &end_of(q)->told; }, pull_failure_of(ranks_.rank, why));
    }
  }

  RINGLET_BOTH void tell_host(uint64_t own, uint64_t told) {
    block_.one([&] {
      if (own != 0) block_.store(&ranks_.host->end.own, own);
      if (told != 0) block_.store(&ranks_.host->end.told, told);
    });
  }

  /// What this block has read of other ranks' tensors is right unless one had them back meanwhile; then it has told so.
  RINGLET_BOTH void look_back() {
    block_.one([&] {
      block_.fence();
      const uint64_t told = block_.peek(&end_of(ranks_.rank)->told);
      if (told != 0) block_.store(&ranks_.host->end.told, told);
    });
  }

  /// Before this epoch's first publication, which brings it about that peers see it. word(q, i): the i-th word of what
  /// rank q is told.
  template <class Word>
  RINGLET_BOTH void tell_call(Word word) {
    constexpr size_t kWords = sizeof(PullCall) / sizeof(uint64_t);
    static_assert(kWords * sizeof(uint64_t) == sizeof(PullCall));
    block_.each([&](size_t thread, size_t threads) {
      for (size_t i = thread; i < static_cast<size_t>(ranks_.world) * kWords; i += threads) {
        const auto q = static_cast<int>(i / kWords);
        reinterpret_cast<uint64_t*>(call(q, ranks_.rank))[i % kWords] = word(q, i % kWords);
      }
    });
  }

  RINGLET_BOTH void publish(uint32_t phase) {
    const auto at = [&](int q) { return progress(q, ranks_.rank); };
    block_.publish(ranks_.world, at, (epoch_ << 16) + phase);
  }

  RINGLET_BOTH bool wait_for_all(uint64_t epoch, uint32_t phase) {
    return wait_together(ranks_.world, epoch, [=](int q) { return Awaited{q, phase}; });
  }

  /// For several peers, each by a thread of its own. At the first wait for a peer in a call: what it calls is compared.
  template <class Steps>
  RINGLET_BOTH bool wait_together(int count, uint64_t epoch, Steps steps) {
    const auto wait = [&](int k) {
      const auto step = steps(k);
      const PullCall* theirs = to_compare_ >> step.peer & 1 ? call(ranks_.rank, step.peer) : nullptr;
      return PullWait{progress(ranks_.rank, step.peer),
                      (epoch << 16) + step.phase,
                      theirs,
                      counts_ == nullptr ? ranks_.call.count : counts_[step.peer],
                      &shared().skews[step.peer],
                      pull_failure(ranks_.rank, step.peer, block_.index(), step.phase)};
    };
    if (!block_.wait(count, wait, PullWatch{ranks_.call, ranks_.budget, end_of(ranks_.rank), ranks_.host}))
      return false;
    for (int k = 0; k < count; ++k) to_compare_ &= ~(uint32_t{1} << steps(k).peer);
    return true;
  }

  RINGLET_BOTH auto& shared() const { return block_.shared(); }

  const PullRanks& ranks_;
  Block& block_;
  const uint64_t* const counts_;
  uint64_t epoch_ = 0;
  uint32_t to_compare_ = 0;  // a bit for each peer
};

}  // namespace ringlet::cuda
