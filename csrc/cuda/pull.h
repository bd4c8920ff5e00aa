// A pull plan (engine/pull/pull_plan.h) as a GPU runs it: one kernel on every rank reads peers' memory, no host in between.
//
// A block runs the whole plan for every blocks-th piece of all chunks, and meets its peers as pull_meeting.h says.
// Ownership and thread safety: as there.
#pragma once

#include "base/home.h"
#include "cuda/pull_meeting.h"

namespace ringlet::cuda {

/// What a block does at once of combines that touch different places: a warp of threads for each, or more.
inline constexpr int kMostTogether = 8;

struct PullStep {
  enum Kind : uint8_t { publish, wait, combine };
  Kind kind;
  Home to;
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
  Home home;
  Home staged;
  bool raw;
};

/// A plan on the device, which gpu/pull_program.h makes, and how it cuts a call.
struct PullProgram {
  const PullStep* steps;
  const PullSource* sources;
  int step_count;
  int source_count;
  int body;       // steps from here on belong to a block's last piece only
  size_t width;   // elements of a piece in every chunk
  size_t pieces;  // a barrier has one of nothing
};

struct PullArgs : PullRanks {
  PullProgram staged;
  PullProgram in_place;  // for when all ranks' tensors are in their heaps, where no staging buffer limits a piece; no
                         // steps: this rank's are not
  size_t parts;
  size_t length;  // elements of a chunk ...
  size_t longer;  // ... of which the first so many have one more
  size_t size;    // bytes of an element
  ReduceOp op;
  double scale;  // premul_sum's, of this rank
  int divisor;   // of finished sums
  bool premul;
  // This rank's own, moved so that chunk 0 would lie there.
  const std::byte* input;
  const std::byte* output;
};

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

template <class E, class Ops, class Block>
class PullInterpreter : PullMeeting<Block> {
  using Meeting = PullMeeting<Block>;

 public:
  RINGLET_BOTH PullInterpreter(const PullArgs& args, Block& block) : Meeting(args, block), args_(args) {}

  RINGLET_BOTH void run() {
    const auto blocks = static_cast<size_t>(args_.blocks), mine = static_cast<size_t>(block_.index());
    if (!Meeting::begin() || mine >= args_.staged.pieces) return;
    block_.one([&] {
      shared().inputs[args_.rank] = args_.input;
      shared().outputs[args_.rank] = args_.output;
      shared().skews[args_.rank] = static_cast<uint8_t>(args_.call.skew);
    });
    // In place there may be fewer pieces than blocks that have met: these have one of nothing.
    for (size_t piece = mine; piece == mine || piece < cut().pieces; piece += blocks) {
      if (!run_piece(piece, piece == mine)) return Meeting::give_up();
      ++epoch_;
    }
    if (reads_in_place_) Meeting::look_back();
  }

 private:
  static constexpr uint8_t kNowhere = 0xff;

  using Meeting::block_;
  using Meeting::call;
  using Meeting::epoch_;
  using Meeting::kSignatureReady;
  using Meeting::publish;
  using Meeting::shared;
  using Meeting::to_compare_;
  using Meeting::wait_for_all;
  using Meeting::wait_together;

  RINGLET_BOTH const PullProgram& cut() const { return reads_in_place_ ? args_.in_place : args_.staged; }

  // The same cut as base/partition.h; the host has divided.
  RINGLET_BOTH size_t offset(size_t chunk) const {
    return chunk * args_.length + (chunk < args_.longer ? chunk : args_.longer);
  }
  RINGLET_BOTH size_t piece_elements(size_t chunk) const {
    const size_t length = args_.length + (chunk < args_.longer ? 1 : 0);
    const size_t rest = length <= begin_ ? 0 : length - begin_;
    return rest < cut().width ? rest : cut().width;
  }

  RINGLET_BOTH size_t place(size_t chunk) const { return (offset(chunk) + begin_) * args_.size; }

  /// Of a staging buffer: where it begins. past() further the piece begins, as far from a pack's start as in the tensor
  /// of the rank that stages it, so that packs meet packs.
  RINGLET_BOTH const std::byte* address(int rank, Home home, size_t chunk) const {
    if (home == Home::input) return shared().inputs[rank] + place(chunk);
    if (home == Home::output) return shared().outputs[rank] + place(chunk);
    return args_.regions[rank] +
           args_.layout.slot(block_.index(), epoch_, home == Home::staging_a ? 0 : 1, chunk, args_.parts);
  }
  RINGLET_BOTH static size_t past(size_t place, uint8_t skew) { return (place + skew) % kPackBytes; }

  RINGLET_BOTH bool run_piece(size_t piece, bool first) {
    to_compare_ = 0;
    // What this piece writes over is two epochs old.
    if (epoch_ > 0 && !wait_for_all(epoch_ - 1, 0)) return false;
    if (first && !begin_call()) return false;
    begin_ = piece * cut().width;
    const bool last = piece + static_cast<size_t>(args_.blocks) >= cut().pieces;
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
    const auto* told = reinterpret_cast<const uint64_t*>(&args_.call);
    Meeting::tell_call([=](int, size_t i) { return told[i]; });
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
    const Home home = is_scaled(source) && source.staged != Home::none ? source.staged : source.home;
    const auto chunk = static_cast<size_t>(source.chunk);
    shared().works[k].srcs[i] = address(source.rank, home, chunk);
    shared().staged_by[k][i] = home < Home::staging_a ? kNowhere : static_cast<uint8_t>(source.rank);
    shared().past[k][i] = static_cast<uint8_t>(past(place(chunk), 0));
  }

  /// Of this rank's own inputs, those that premul_sum has not scaled yet. What it staged it has.
  RINGLET_BOTH bool is_scaled(const PullSource& source) const {
    return args_.premul && source.raw && source.rank == args_.rank;
  }

  RINGLET_BOTH void fill(ReduceWork<kMostRanks>& work, const PullStep& step) const {
    const auto chunk = static_cast<size_t>(step.chunk);
    const size_t further = step.to < Home::staging_a ? 0 : past(place(chunk), shared().skews[args_.rank]);
    work.dst = const_cast<std::byte*>(address(args_.rank, step.to, chunk)) + further;
    work.dst2 = step.tee ? const_cast<std::byte*>(address(args_.rank, Home::output, chunk)) : nullptr;
    work.n = step.sources;
    work.op = args_.op;
    work.scale = args_.scale;
    work.scaled_source = -1;
    work.divisor = step.finish ? args_.divisor : 1;
    for (int i = 0; args_.premul && i < step.sources; ++i) {
      const PullSource& source = program_.sources[step.first_source + i];
      if (is_scaled(source) && source.staged == Home::none) work.scaled_source = i;
    }
    const size_t bytes = piece_elements(chunk) * args_.size;
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
    constexpr int kPacks = kPacksAtOnce<E, Ops> / 2;
    if (is_copy(work)) {
      copy_as_thread(work, thread, threads);
    } else if (work.n == 2 && work.scaled_source < 0 && work.divisor == 1) {
      reduce_as_thread<E, Ops, kMostRanks, /*kPair=*/true, kPacks>(work, thread, threads);
    } else {
      reduce_as_thread<E, Ops, kMostRanks, /*kPair=*/false, kPacks>(work, thread, threads);
    }
  }

  RINGLET_BOTH static bool is_copy(const ReduceWork<kMostRanks>& work) {
    return work.n == 1 && work.scaled_source < 0 && work.divisor == 1;
  }

  const PullArgs& args_;
  PullProgram program_{};
  bool reads_in_place_ = false;
  size_t begin_ = 0;
};

}  // namespace ringlet::cuda
