// The page by which a rank tells its peers how far it is, what it is calling, and whether it failed.
//
// Only its owner writes it; peers map it read-only and poll. `progress` counts for ever upwards:
//   epoch << 16               every segment before `epoch` is complete
//   epoch << 16 | kSignatureReady  the call's description for `epoch` can be read
//   epoch << 16 | ready(r)    rounds before r of `epoch` are complete and what round r sends can be read
// An epoch is one segment of one call. A rank starts epoch e only when all peers completed e - 2, so what a slot of
// parity e % 2 holds (descriptions, staging buffers) is not overwritten while a peer may read it.
#pragma once

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
constexpr uint64_t at(uint64_t epoch, uint32_t stage) { return (epoch << 16) + stage; }

/// What a rank is calling: compared by its peers before any data is used.
struct CallSignature {
  uint64_t signature = 0;  // engine/call.h packs it
  uint64_t count = 0;
};

/// What goes with it, seldom read.
struct CallDetail {
  uint64_t sequence = 0;
  uint64_t input = 0;  // registered addresses, if the signature says so
  uint64_t output = 0;
  CallSignature previous;  // the call before, for the message where ranks parted there
};

/// Words that their owner changes while others read them, for people: who reads meanwhile may get some of both.
class SharedText {
 public:
  void set(std::string_view text) noexcept;  // cut to what there is room for
  std::string get() const;

 private:
  std::atomic<uint64_t> words_[32];
};

enum class Presence : uint32_t { starting, present, left };

struct Control {
  static constexpr size_t kMessageBytes = 1536;

  // One line: a peer that sees the progress has what it compares at hand.
  alignas(64) std::atomic<uint64_t> progress;
  CallSignature calls[2];  // by parity of the call's first epoch
  alignas(64) CallDetail details[2];
  // The rest changes seldom, so peers keep its lines in their caches.
  alignas(64) std::atomic<uint32_t> sleeping_on;   // 1 + the rank whose progress this rank sleeps on; 0 = awake
  std::atomic<uint32_t> awaiting_messages;         // a thread of this rank sleeps until a segment is put out or taken
  std::atomic<uint32_t> asleep[kConnectionKinds];  // a thread of this rank sleeps until its wakeup is signalled
  std::atomic<uint32_t> presence;
  std::atomic<uint32_t> failed;  // 1 + ErrorKind; `message` is complete once it is set
  char message[kMessageBytes];
  // What this rank has waited in for long; empty: it does not.
  SharedText in_collective, in_message;

  void fail(ErrorKind kind, const char* text) noexcept;  // first call wins
};
static_assert(sizeof(Control) <= 4096);

/// One ring of bytes to the peer, and how far this rank has read the peer's (transport/ring_pipe.h). Bytes are counted
/// for ever, modulo 2^32.
struct RingCounters {
  std::atomic<uint32_t> sent;
  std::atomic<uint32_t> received;
  std::atomic<uint32_t> finished;  // nothing more will be sent
  std::atomic<uint32_t> closed;    // nothing more will be received
};

/// Point-to-point traffic with one peer, both directions; the owner of the region writes all of it.
struct Channel {
  alignas(64) std::atomic<uint32_t> sent;  // segments put out for the peer, ever
  std::atomic<uint32_t> received;          // segments taken from the peer, ever
  RingCounters rings[2];                   // in place of segments where the group has a mesh: collectives, messages
};
static_assert(sizeof(Channel) == 64);

/// Stands before each point-to-point segment.
struct alignas(64) StagingHeader {
  uint64_t dtype;
  uint64_t count;     // elements of the whole message
  uint64_t in_place;  // 1: the message lies at the registered `address`, whole
  uint64_t address;
  int64_t tag;
};

// Sleeping on a word of shared memory (futex); `word` may be mapped read-only.
void sleep_on(const std::atomic<uint64_t>& word, uint64_t seen, int64_t nanoseconds) noexcept;

/// Until one of several words changes from what was seen.
struct Watched {
  const std::atomic<uint32_t>* word;
  uint32_t seen;
};
void sleep_on_any(const std::vector<Watched>& words, int64_t nanoseconds) noexcept;
void wake_all(const std::atomic<uint64_t>& word) noexcept;
void wake_all(const std::atomic<uint32_t>& word) noexcept;

}  // namespace ringlet
