#include "gpu/pull_program.h"

#include <algorithm>

namespace ringlet {
namespace {

using cuda::PullSource;
using cuda::PullStep;

// The kernel has numbers for what the host has names for.
static_assert(static_cast<int>(PlanStep::Kind::combine) == PullStep::combine);

class Flattener {
 public:
  Flattener(const PullPlan& plan, int rank) : plan_(plan), rank_(rank) {}

  FlatPlan make() {
    const size_t body = std::min(plan_.body, plan_.steps.size());
    append_range(0, body);
    flat_.body = static_cast<int>(flat_.steps.size());
    append_range(body, plan_.steps.size());
    return std::move(flat_);
  }

 private:
  /// Between two publications waits go first. No peer can tell: it sees what is published, and nothing before.
  void append_range(size_t begin, size_t end) {
    first_ = flat_.steps.size();  // whose steps join none before
    const auto is = [&](size_t i, PlanStep::Kind kind) { return plan_.steps[i].kind == kind; };
    for (size_t i = begin; i < end;) {
      size_t next = i;
      while (next < end && !is(next, PlanStep::Kind::publish)) ++next;
      for (const PlanStep::Kind kind : {PlanStep::Kind::wait, PlanStep::Kind::combine}) {
        for (size_t k = i; k < next; ++k) {
          if (is(k, kind)) append(plan_.steps[k]);
        }
      }
      if (next < end) append(plan_.steps[next]);
      i = next + 1;
    }
  }

  void append(const PlanStep& step) {
    const int chunks = step.kind == PlanStep::Kind::combine ? step.chunks : 1;
    for (int c = 0; c < chunks; ++c) {
      const int first_source = static_cast<int>(flat_.sources.size());
      for (int i = 0; i < step.sources; ++i) {
        const Source& s = plan_.sources[static_cast<size_t>(step.first_source + i)];
        flat_.sources.push_back({s.rank, s.chunk + c, s.home, s.staged, s.raw});
      }
      flat_.steps.push_back({static_cast<PullStep::Kind>(step.kind), step.to, step.tee, step.finish,
                             /*together=*/1, step.peer, step.phase, step.chunk + c, first_source, step.sources});
      join();
    }
  }

  /// Takes the last step side by side with those before it, from first_ on, or begins anew with it.
  void join() {
    const size_t last = flat_.steps.size() - 1;
    PullStep& step = flat_.steps[last];
    const auto beside = [&](const PullStep& other) {
      return step.kind == PullStep::combine && !touches(other, step) && !touches(step, other);
    };
    const auto begin = flat_.steps.begin() + static_cast<std::ptrdiff_t>(first_), end = flat_.steps.end() - 1;
    const size_t most = step.kind == PullStep::wait ? cuda::kMostRanks : cuda::kMostTogether;
    if (first_ < last && begin->kind == step.kind && last - first_ < most &&
        (step.kind == PullStep::wait || std::all_of(begin, end, beside))) {
      begin->together = static_cast<uint8_t>(last - first_ + 1);
    } else {
      first_ = last;
    }
  }

  /// Input and output may be the same memory, chunk by chunk.
  static bool same_place(Home home, int chunk, Home other_home, int other_chunk) {
    const auto memory = [](Home each) { return each == Home::output ? Home::input : each; };
    return chunk == other_chunk && memory(home) == memory(other_home);
  }

  /// Whether `writer` writes what `other` reads or writes.
  bool touches(const PullStep& writer, const PullStep& other) const {
    const auto writes = [&](Home home, int chunk) {
      return same_place(writer.to, writer.chunk, home, chunk) ||
             (writer.tee && same_place(Home::output, writer.chunk, home, chunk));
    };
    if (writes(other.to, other.chunk) || (other.tee && writes(Home::output, other.chunk))) return true;
    for (int i = 0; i < other.sources; ++i) {
      const PullSource& source = flat_.sources[static_cast<size_t>(other.first_source + i)];
      if (source.rank != rank_) continue;
      if (writes(source.home, source.chunk)) return true;
      if (source.staged != Home::none && writes(source.staged, source.chunk)) return true;
    }
    return false;
  }

  const PullPlan& plan_;
  const int rank_;
  size_t first_ = 0;  // of the steps that the next may join
  FlatPlan flat_;
};

}  // namespace

FlatPlan flatten(const PullPlan& plan, int rank) { return Flattener(plan, rank).make(); }

}  // namespace ringlet
