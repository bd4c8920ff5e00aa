// A schedule: what one rank does in one collective, as plain data. Four verbs, for ever.
//
//   send(peer, chunks)     sends `peer` these chunks, as they were before the round
//   recv(peer, chunks)     overwrites these chunks with chunks of `peer`
//   reduce(peer, chunks)   combines these chunks with chunks of `peer`
//   copy(chunks, target)   local: overwrites chunks [target, ...) with these chunks
//
// Chunks are indices into `parts` parts of the collective's buffer (schedule/collective.h says which of them are a
// rank's input and output). All reads of a round see the values from before the round; its steps begin and complete
// together. Rounds order the steps of one rank; they are not a global barrier. The k-th send from a to b matches the
// k-th recv or reduce at b from a. Several reduces into one chunk in one round are one n-ary reduction in ascending
// order of ranks, with the own value in the place of the own rank; those from one rank in the order of their messages.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

namespace ringlet {

enum class Verb : uint8_t { send, recv, reduce, copy };

/// Chunks [first, first + count).
struct Chunks {
  int first = 0;
  int count = 1;

  int end() const { return first + count; }
  bool contains(int chunk) const { return chunk >= first && chunk < end(); }
};

struct Step {
  Verb verb;
  int peer;  // for copy: the first target chunk
  int first;
  int count;
};
static_assert(sizeof(Step) == 16);

struct Round {
  std::vector<Step> steps;

  Round& send(int peer, Chunks chunks) { return add(Verb::send, peer, chunks); }
  Round& recv(int peer, Chunks chunks) { return add(Verb::recv, peer, chunks); }
  Round& reduce(int peer, Chunks chunks) { return add(Verb::reduce, peer, chunks); }
  Round& copy(Chunks chunks, int target) { return add(Verb::copy, target, chunks); }

 private:
  Round& add(Verb verb, int peer, Chunks chunks) {
    steps.push_back({verb, peer, chunks.first, chunks.count});
    return *this;
  }
};

struct Schedule {
  explicit Schedule(int parts) : parts(parts) {}

  /// Opens a new round. The reference is valid until the next round is opened.
  Round& round() { return rounds.emplace_back(); }

  /// Appends the rounds of `next`, which must have the same parts: so two halves make an all-reduce.
  Schedule& then(Schedule next) {
    for (Round& r : next.rounds) rounds.push_back(std::move(r));
    return *this;
  }

  int parts;
  std::vector<Round> rounds;
};

}  // namespace ringlet
