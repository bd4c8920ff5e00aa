// The control page: on it a rank tells its peers its progress, the call that it is in, and whether it failed.
//
// Only its owner writes it; peers map it read-only and poll. `progress` only grows:
//   epoch << 16                    every segment before `epoch` is complete
//   epoch << 16 | kSignatureReady  the call signature for `epoch` can be read
//   epoch << 16 | ready(r)         rounds before r of `epoch` are complete; peers can read what round r sends
// An epoch is one segment of one call. A rank starts epoch e only when all peers have completed e - 2. So it overwrites
// no signature and no staging buffer of parity e % 2 that a peer may still read.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "transport/pipe.h"

namespace ringlet {

inline constexpr uint32_t kSignatureReady = 1;
constexpr uint32_t ready(int round) { return 2 + static_cast<uint32_t>(round); }
constexpr uint64_t at(uint64_t epoch, uint32_t phase) { return (epoch << 16) + phase; }

/// The call that a rank makes: its peers compare it before they use any data.
struct CallSignature {
  uint64_t signature = 0;  // engine/call.h packs it
  uint64_t count = 0;
};

/// The rarely read part of a call signature.
struct CallDetail {
  uint64_t sequence = 0;
  uint64_t input = 0;  // registered addresses, if the signature says so
  uint64_t output = 0;
  CallSignature previous;                     // of the call before: for the error message, if ranks differed there
  std::array<std::array<float, 3>, 2> costs;  // of what this rank has tried (engine/pull/call_trials.h)
};
static_assert(sizeof(CallDetail) == 64);

/// A text for messages, which its owner changes while peers read it: a reader may get a mixture of old and new.
class SharedText {
 public:
  void set(std::string_view text) noexcept;  // cut to the size of the buffer
  std::string get() const;

 private:
  std::atomic<uint64_t> words_[32];
};

enum class Presence : uint32_t { starting, present, left };

struct Control {
  static constexpr size_t kMessageBytes = 1536;

  // In one cache line: a peer that reads the progress has the signatures, too.
  alignas(64) std::atomic<uint64_t> progress;
  CallSignature calls[2];  // by parity of the call's first epoch
  alignas(64) CallDetail details[2];
  // The rest changes seldom, so peers keep its lines in their caches.
  alignas(64) std::atomic<uint32_t> sleeping_on;   // 1 + the rank whose progress this rank sleeps on; 0 = awake
  std::atomic<uint32_t> awaiting_messages;         // a thread of this rank sleeps until a segment is put out or taken
  std::atomic<uint32_t> asleep[kConnectionKinds];  // a thread of this rank sleeps until its wakeup is signalled
  std::atomic<uint32_t> withdrawn;                 // in a group with a mesh: what this rank gave to read may change
  std::atomic<uint32_t> presence;
  // 1 + ErrorKind, and << 8 the rank in which the error began; `message` is complete once it is set.
  std::atomic<uint32_t> failed;
  char message[kMessageBytes];
  // The collective and the message in which this rank has waited for long; empty: in none.
  SharedText in_collective, in_message;
  // Of ranks that are threads: how many of this rank's threads read tensors of peers now (engine/pull/peer_reads.h).
  alignas(64) std::atomic<uint32_t> reading;

  void fail(ErrorKind kind, int origin, std::string_view text) noexcept;  // first call wins
};
static_assert(sizeof(Control) <= 4096);

/// One ring of bytes to the peer, and how far this rank has read the peer's ring (transport/ring_pipe.h). All bytes
/// are counted, modulo 2^32.
struct RingCounters {
  std::atomic<uint32_t> sent;
  std::atomic<uint32_t> received;
  std::atomic<uint32_t> finished;  // nothing more will be sent
  std::atomic<uint32_t> closed;    // nothing more will be received
};

/// Point-to-point messages with one peer, in both directions. Only the owner of the region writes it.
struct Channel {
  alignas(64) std::atomic<uint32_t> sent;  // segments put out for the peer since the group was made
  std::atomic<uint32_t> received;          // segments taken from the peer since the group was made
  std::atomic<uint32_t> copy_time;         // nanoseconds, of the last segment taken that was to be timed
  RingCounters rings[2];                   // in place of segments, if the group has a mesh: of collectives, of messages
};
static_assert(sizeof(Channel) == 64);

/// Stands before each point-to-point segment.
struct alignas(64) StagingHeader {
  uint64_t dtype;
  uint64_t count;     // elements of the whole message
  uint64_t in_place;  // 1: the message lies at the registered `address`, whole
  uint64_t address;
  int64_t tag;
  uint64_t timed;  // 1: the receiver tells how long its copy took
};

// Sleeping on a word of shared memory (futex); `word` may be mapped read-only.
void sleep_on(const std::atomic<uint64_t>& word, uint64_t seen, int64_t nanoseconds) noexcept;

/// A word, and the value that was read last: sleep_on_any sleeps until one of several words has another value.
struct Watched {
  const std::atomic<uint32_t>* word;
  uint32_t seen;
};
void sleep_on_any(const std::vector<Watched>& words, int64_t nanoseconds) noexcept;
void wake_all(const std::atomic<uint64_t>& word) noexcept;
void wake_all(const std::atomic<uint32_t>& word) noexcept;

}  // namespace ringlet
