// A pull plan (engine/pull/plan.h) as a GPU runs it: one kernel on every rank reads peers' memory, no host in between.
//
// A block runs the whole plan for every blocks-th piece of all chunks, and waits only for the blocks of its number on
// other ranks. Its progress is one 64-bit word, as in transport/control.h: epoch << 16 | phase, one epoch a piece. Data
// is pulled, progress is pushed: a block writes it into all ranks' regions, and a waiting block looks at its own. The
// word lives on the device, so a replayed launch goes on from where the last one ended. Beside it lies the call: peers
// compare it and learn where the tensors are. Every wait has a budget. A block whose wait is over, or whose peer calls
// something else, writes that into its own region's first line, then into its peers', and ends; so do the others.
// Ownership: none. Thread safety: one launch per rank at a time; in other ranks' memory a kernel writes only its part.
// `Block` says what a block of threads is: on the device in pull.cu, on the host in tests/cpp/host_block.h.
#pragma once

#include "cuda/reduce.h"

namespace ringlet::cuda {

inline constexpr int kMostRanks = 32;

/// What a block does at once of combines that touch different places: a warp of threads for each, or more.
inline constexpr int kMostTogether = 8;

struct PullStep {
  enum Kind : uint8_t { publish, wait, combine };
  Kind kind;
  uint8_t to;
  bool tee;
  bool finish;
  uint8_t together;  // so many steps from this one on, all of its kind, can be taken side by side
  int peer;
  uint32_t phase;
  int chunk;
  int first_source;
  int sources;
};

struct PullSource {
  int rank;
  int chunk;
  uint8_t space;
  uint8_t staged;
  bool raw;
};

// Spaces by number; all from staging_a on are staging buffers.
inline constexpr uint8_t kNoSpace = 0, kInput = 1, kOutput = 2, kStagingA = 3;

/// What a rank calls, for peers to compare and to find its tensors: bytes from its heap's start, moved so that chunk 0
/// would lie there.
struct PullCall {
  uint64_t signature;  // engine/call.h packs it
  uint64_t count;
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

/// A plan on the device; gpu/pull_program.h makes it.
struct PullProgram {
  const PullStep* steps;
  const PullSource* sources;
  int step_count;
  int source_count;
  int body;  // steps from here on belong to a block's last piece only
};

struct PullArgs {
  PullProgram staged;
  PullProgram in_place;  // for when all ranks' tensors are in their heaps; no steps: this rank's are not
  PullCall call;
  int rank;
  int world;
  int blocks;  // of this kernel
  PullLayout layout;
  PullHost* host;
  size_t parts;
  size_t length;  // elements of a chunk ...
  size_t longer;  // ... of which the first so many have one more
  size_t size;    // bytes of an element
  size_t width;   // elements of a piece in every chunk
  size_t pieces;  // at least one: a barrier has one of nothing
  double scale;   // premul_sum's, of this rank
  int divisor;    // of finished sums
  bool premul;
  uint64_t budget;  // of a wait, in the block's unit of time
  std::byte* regions[kMostRanks];
  std::byte* heaps[kMostRanks];
  // This rank's own, moved so that chunk 0 would lie there.
  const std::byte* input;
  const std::byte* output;
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
  uint8_t* skew;         // which the call tells
  uint64_t failure;
};

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
  return wait.call->signature == own.signature && wait.call->count == own.count;
}

template <class Block>
RINGLET_BOTH void fail(const PullWatch& watch, uint64_t failure) {
  if (Block::claim(&watch.end->own, failure)) Block::store(&watch.host->end.own, failure);
}

/// What a block's threads share.
struct PullShared {
  ReduceWork<kMostRanks> works[kMostTogether];
  // Of a work's sources: the rank in whose staging buffer one is, or kNowhere, and how far it lies past a pack's start
  // but for that rank's skew.
  uint8_t staged_by[kMostTogether][kMostRanks];
  uint8_t past[kMostTogether][kMostRanks];
  // By rank, as far as this block knows them.
  const std::byte* inputs[kMostRanks];
  const std::byte* outputs[kMostRanks];
  uint8_t skews[kMostRanks];
  bool in_place;
  // The program, where it has room: in the device's memory each step would be two reads, one after the other.
  PullStep steps[72];
  PullSource sources[144];
};

template <class E, class Op, class Block>
class PullInterpreter {
 public:
  RINGLET_BOTH PullInterpreter(const PullArgs& args, Block& block) : args_(args), block_(block) {}

  RINGLET_BOTH void run() {
    const auto blocks = static_cast<size_t>(args_.blocks), mine = static_cast<size_t>(block_.index());
    PullEnd* const end = end_of(args_.rank);
    // Three ways to memory, side by side.
    const uint64_t own = block_.peek(&end->own), told = block_.peek(&end->told);
    const uint64_t before = block_.peek(progress(args_.rank, args_.rank));
    // A call before did not end: its epochs are no longer its peers'.
    if (block_.any((own | told) != 0)) return tell_host(own, told);
    epoch_ = before >> 16;
    block_.one([&] {
      shared().inputs[args_.rank] = args_.input;
      shared().outputs[args_.rank] = args_.output;
      shared().skews[args_.rank] = static_cast<uint8_t>(args_.call.skew);
    });
    for (size_t piece = mine; piece < args_.pieces; piece += blocks) {
      begin_ = piece * args_.width;
      if (!run_piece(piece == mine, piece + blocks >= args_.pieces)) return give_up();
      ++epoch_;
    }
    if (reads_in_place_) look_back();
  }

 private:
  static constexpr uint32_t kSignatureReady = 1;
  static constexpr uint8_t kNowhere = 0xff;

  // What has come from a rank, in another's incoming area or in this one's.
  RINGLET_BOTH uint64_t* progress(int at, int from) const {
    return reinterpret_cast<uint64_t*>(args_.regions[at] + args_.layout.progress(block_.index(), from));
  }
  RINGLET_BOTH PullCall* call(int at, int from) const {
    return reinterpret_cast<PullCall*>(args_.regions[at] + args_.layout.call(block_.index(), from, epoch_));
  }

  RINGLET_BOTH PullEnd* end_of(int rank) const { return reinterpret_cast<PullEnd*>(args_.regions[rank]); }

  // The same cut as base/partition.h; the host has divided.
  RINGLET_BOTH size_t offset(size_t chunk) const {
    return chunk * args_.length + (chunk < args_.longer ? chunk : args_.longer);
  }
  RINGLET_BOTH size_t elements(size_t chunk) const {
    const size_t length = args_.length + (chunk < args_.longer ? 1 : 0);
    const size_t rest = length <= begin_ ? 0 : length - begin_;
    return rest < args_.width ? rest : args_.width;
  }

  RINGLET_BOTH size_t place(size_t chunk) const { return (offset(chunk) + begin_) * args_.size; }

  /// Of a staging buffer: where it begins. past() further the piece begins, as far from a pack's start as in the tensor
  /// of the rank that stages it, so that packs meet packs.
  RINGLET_BOTH const std::byte* address(int rank, uint8_t space, size_t chunk) const {
    if (space == kInput) return shared().inputs[rank] + place(chunk);
    if (space == kOutput) return shared().outputs[rank] + place(chunk);
    return args_.regions[rank] + args_.layout.slot(block_.index(), epoch_, space - kStagingA, chunk, args_.parts);
  }
  RINGLET_BOTH static size_t past(size_t place, uint8_t skew) { return (place + skew) % kPackBytes; }

  /// This rank's tensors are its caller's again when the kernel ends, though peers may still be reading them: they are
  /// told before. Of calls that differ they find out themselves, before they read.
  RINGLET_BOTH void give_up() {
    const uint64_t why = block_.load(&end_of(args_.rank)->own);
    if ((why & kOtherCall) == 0) {
      block_.publish(args_.world, [&](int q) { return &end_of(q)->told; }, pull_failure_of(args_.rank, why));
    }
  }

  RINGLET_BOTH void tell_host(uint64_t own, uint64_t told) {
    block_.one([&] {
      if (own != 0) block_.store(&args_.host->end.own, own);
      if (told != 0) block_.store(&args_.host->end.told, told);
    });
  }

  /// What this block has read of other ranks' tensors is right unless one had them back meanwhile; then it has told so.
  RINGLET_BOTH void look_back() {
    block_.one([&] {
      block_.fence();
      const uint64_t told = block_.peek(&end_of(args_.rank)->told);
      if (told != 0) block_.store(&args_.host->end.told, told);
    });
  }

  RINGLET_BOTH bool run_piece(bool first, bool last) {
    to_compare_ = 0;
    // What this piece writes over is two epochs old.
    if (epoch_ > 0 && !wait_for_all(epoch_ - 1, 0)) return false;
    if (first && !begin_call()) return false;
    const int end = last ? program_.step_count : program_.body;
    bool prepared = false;
    for (int i = 0, together = 0; i < end; i += together) {
      const PullStep* steps = program_.steps + i;
      together = steps->together;
      if (steps->kind == PullStep::publish) publish(steps->phase);
      if (steps->kind == PullStep::wait) {
        // What follows is addressed while the peers' progress is on its way.
        const PullStep* next = steps + together;
        prepared = i + together < end && next->kind == PullStep::combine;
        if (prepared) prepare(next);
        if (!wait_together(together, epoch_, [=](int k) { return steps[k]; })) return false;
      }
      if (steps->kind == PullStep::combine) {
        if (!prepared) prepare(steps);
        combine(steps);
        prepared = false;
      }
    }
    return true;
  }

  /// Tells what is called, and finds out which program it is.
  RINGLET_BOTH bool begin_call() {
    to_compare_ = ~uint32_t{0};
    tell_call();
    const bool may_be_in_place = args_.in_place.steps != nullptr;
    if (may_be_in_place) {
      publish(kSignatureReady);
      if (!wait_for_all(epoch_, kSignatureReady)) return false;
      find_tensors();
    }
    reads_in_place_ = may_be_in_place && shared().in_place;
    take(reads_in_place_ ? args_.in_place : args_.staged);
    return true;
  }

  /// Before this epoch's first publication, which brings it about that peers see it.
  RINGLET_BOTH void tell_call() {
    constexpr size_t kWords = sizeof(PullCall) / sizeof(uint64_t);
    static_assert(kWords * sizeof(uint64_t) == sizeof(PullCall));
    const auto* told = reinterpret_cast<const uint64_t*>(&args_.call);
    block_.each([&](size_t thread, size_t threads) {
      for (size_t i = thread; i < static_cast<size_t>(args_.world) * kWords; i += threads) {
        reinterpret_cast<uint64_t*>(call(static_cast<int>(i / kWords), args_.rank))[i % kWords] = told[i % kWords];
      }
    });
  }

  /// Brings a program to where the block's threads read it at once.
  RINGLET_BOTH void take(const PullProgram& program) {
    constexpr int kSteps = sizeof(PullShared::steps) / sizeof(PullStep);
    constexpr int kSources = sizeof(PullShared::sources) / sizeof(PullSource);
    program_ = program;
    if (program.step_count <= kSteps && program.source_count <= kSources) {
      block_.each([&](size_t thread, size_t threads) {
        const auto first = static_cast<int>(thread), apart = static_cast<int>(threads);
        for (int i = first; i < program.step_count; i += apart) shared().steps[i] = program.steps[i];
        for (int i = first; i < program.source_count; i += apart) shared().sources[i] = program.sources[i];
      });
      program_.steps = shared().steps;
      program_.sources = shared().sources;
    }
    block_.together();  // also what one thread has written before is everybody's
  }

  /// Where all ranks' tensors are, if all are where peers can read them.
  RINGLET_BOTH void find_tensors() {
    block_.one([&] {
      shared().in_place = true;
      for (int q = 0; q < args_.world; ++q) {
        const PullCall& theirs = *call(args_.rank, q);
        if (theirs.in_heap == 0) shared().in_place = false;
        if (q == args_.rank) continue;
        shared().inputs[q] = args_.heaps[q] + theirs.input;
        shared().outputs[q] = args_.heaps[q] + theirs.output;
      }
    });
    block_.together();
  }

  RINGLET_BOTH PullShared& shared() const { return block_.shared(); }

  RINGLET_BOTH void publish(uint32_t phase) {
    const auto at = [&](int q) { return progress(q, args_.rank); };
    block_.publish(args_.world, at, (epoch_ << 16) + phase);
  }

  RINGLET_BOTH bool wait_for_all(uint64_t epoch, uint32_t phase) {
    return wait_together(args_.world, epoch, [=](int q) {
      PullStep step{};
      step.peer = q;
      step.phase = phase;
      return step;
    });
  }

  /// For several peers, each by a thread of its own. At the first wait for a peer in a call: what it calls is compared.
  template <class Steps>
  RINGLET_BOTH bool wait_together(int count, uint64_t epoch, Steps steps) {
    const auto wait = [&](int k) {
      const PullStep step = steps(k);
      const PullCall* theirs = to_compare_ >> step.peer & 1 ? call(args_.rank, step.peer) : nullptr;
      return PullWait{progress(args_.rank, step.peer), (epoch << 16) + step.phase, theirs, &shared().skews[step.peer],
                      pull_failure(args_.rank, step.peer, block_.index(), step.phase)};
    };
    if (!block_.wait(count, wait, PullWatch{args_.call, args_.budget, end_of(args_.rank), args_.host})) return false;
    for (int k = 0; k < count; ++k) to_compare_ &= ~(uint32_t{1} << steps(k).peer);
    return true;
  }

  /// Fills the works of the steps that are taken side by side, each by a warp, and each source by a lane of it; but for
  /// where peers' staged pieces begin, which only they know.
  RINGLET_BOTH void prepare(const PullStep* steps) {
    block_.lanes(steps->together, [&](int k, int lane, int lanes) {
      for (int i = lane; i < steps[k].sources; i += lanes) address_source(k, steps[k], i);
      if (lane == 0) fill(shared().works[k], steps[k]);
    });
  }

  RINGLET_BOTH void address_source(int k, const PullStep& step, int i) const {
    const PullSource& source = program_.sources[step.first_source + i];
    const uint8_t space = is_scaled(source) && source.staged != kNoSpace ? source.staged : source.space;
    const auto chunk = static_cast<size_t>(source.chunk);
    shared().works[k].srcs[i] = address(source.rank, space, chunk);
    shared().staged_by[k][i] = space < kStagingA ? kNowhere : static_cast<uint8_t>(source.rank);
    shared().past[k][i] = static_cast<uint8_t>(past(place(chunk), 0));
  }

  /// Of this rank's own inputs, those that premul_sum has not scaled yet. What it staged it has.
  RINGLET_BOTH bool is_scaled(const PullSource& source) const {
    return args_.premul && source.raw && source.rank == args_.rank;
  }

  RINGLET_BOTH void fill(ReduceWork<kMostRanks>& work, const PullStep& step) const {
    const auto chunk = static_cast<size_t>(step.chunk);
    const size_t further = step.to < kStagingA ? 0 : past(place(chunk), shared().skews[args_.rank]);
    work.dst = const_cast<std::byte*>(address(args_.rank, step.to, chunk)) + further;
    work.dst2 = step.tee ? const_cast<std::byte*>(address(args_.rank, kOutput, chunk)) : nullptr;
    work.n = step.sources;
    work.scale = args_.scale;
    work.scaled_source = -1;
    work.divisor = step.finish ? args_.divisor : 1;
    for (int i = 0; args_.premul && i < step.sources; ++i) {
      const PullSource& source = program_.sources[step.first_source + i];
      if (is_scaled(source) && source.staged == kNoSpace) work.scaled_source = i;
    }
    const size_t bytes = elements(chunk) * args_.size;
    work.count = is_copy(work) ? bytes : bytes / sizeof(typename E::Bits);  // a complex number is two reals to its sums
  }

  /// Steps that go side by side, each by threads of its own.
  RINGLET_BOTH void combine(const PullStep* steps) {
    const int together = steps->together;
    block_.lanes(together, [&](int k, int lane, int lanes) {
      const bool alike = settle(k, lane, lanes);
      ReduceWork<kMostRanks>& work = shared().works[k];
      if (lane != 0) return;
      if (is_copy(work)) {
        find_packs(work, Bytes<1>(), alike);
      } else {
        find_packs(work, Bytes<sizeof(typename E::Bits)>(), alike);
      }
    });
    block_.together();
    block_.split(together, [&](int k, size_t thread, size_t threads) { move(shared().works[k], thread, threads); });
    block_.together();  // before the works are filled again
  }

  /// Now peers' skews are known. Whether all sources are as far from a pack's start as what is made of them.
  RINGLET_BOTH bool settle(int k, int lane, int lanes) {
    block_.warp();  // what other lanes have prepared
    ReduceWork<kMostRanks>& work = shared().works[k];
    const size_t start = past_pack(work.dst);
    bool alike = true;
    for (int i = lane; i < work.n; i += lanes) {
      const uint8_t rank = shared().staged_by[k][i];
      if (rank != kNowhere) work.srcs[i] += past(shared().past[k][i], shared().skews[rank]);
      alike = alike && past_pack(work.srcs[i]) == start;
    }
    return block_.all_lanes(alike);
  }

  /// With half as many packs under way as a reduction alone has: a block has twice the threads.
  RINGLET_BOTH static void move(const ReduceWork<kMostRanks>& work, size_t thread, size_t threads) {
    constexpr int kPacks = kPacksAtOnce<E, Op> / 2;
    if (is_copy(work)) {
      copy_as_thread(work, thread, threads);
    } else if (work.n == 2 && work.scaled_source < 0 && work.divisor == 1) {
      reduce_as_thread<E, Op, kMostRanks, /*kPair=*/true, kPacks>(work, thread, threads);
    } else {
      reduce_as_thread<E, Op, kMostRanks, /*kPair=*/false, kPacks>(work, thread, threads);
    }
  }

  RINGLET_BOTH static bool is_copy(const ReduceWork<kMostRanks>& work) {
    return work.n == 1 && work.scaled_source < 0 && work.divisor == 1;
  }

  const PullArgs& args_;
  Block& block_;
  PullProgram program_{};
  uint64_t epoch_ = 0;
  uint32_t to_compare_ = 0;  // a bit for each peer
  bool reads_in_place_ = false;
  size_t begin_ = 0;
};

}  // namespace ringlet::cuda
