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
#include <iterator>
#include <string>
#include <string_view>

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

struct Control {
  static constexpr size_t kMessageBytes = 1536;

  // In one cache line: a peer that reads the progress has the signatures, too.
  alignas(64) std::atomic<uint64_t> progress;
  CallSignature calls[2];  // by parity of the call's first epoch
  alignas(64) CallDetail details[2];
  // The rest changes seldom, so peers keep its lines in their caches.
  alignas(64) std::atomic<uint32_t> sleeping_on;  // 1 + the rank whose progress this rank sleeps on; 0 = awake
  // A thread of this rank sleeps until its wakeup for that kind of connection is signalled.
  std::atomic<uint32_t> asleep[std::size(kConnectionKinds)];
  std::atomic<uint32_t> withdrawn;  // in a group with a mesh: what this rank gave to read may change
  std::atomic<uint32_t> left;       // not 0: the group
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

/// Of one connection with a peer (transport/ring_pipe.h). All segments are counted, modulo 2^32. Only the owner of the
/// region writes it.
struct alignas(64) RingCounters {
  static constexpr uint32_t kMostSegments = 16;
  static constexpr uint32_t kTimed = uint32_t{1} << 31;  // the receiver tells how long its copy took

  std::atomic<uint32_t> sent;                    // put out for the peer
  std::atomic<uint32_t> received;                // taken from the peer
  std::atomic<uint32_t> finished;                // nothing more will be sent
  std::atomic<uint32_t> closed;                  // nothing more will be received
  std::atomic<uint32_t> copy_time;               // nanoseconds, of the last segment taken that was to be timed
  std::atomic<uint32_t> lengths[kMostSegments];  // of the last segments put out, in bytes; and kTimed
};

/// The connections with one peer, by kind.
struct Channel {
  RingCounters rings[std::size(kConnectionKinds)];
};

// Sleeping on a word of shared memory (futex); `word` may be mapped read-only.
void sleep_on(const std::atomic<uint64_t>& word, uint64_t seen, int64_t nanoseconds) noexcept;
void wake_all(const std::atomic<uint64_t>& word) noexcept;

}  // namespace ringlet
