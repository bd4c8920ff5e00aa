// A pipe: bytes to and from one peer, in order, in both directions. No call waits.
//
// A pipe is a socket or a ring in shared memory; the code that moves bytes does not see which.
// Ownership: Mesh owns all pipes of a group. Thread safety: one thread at a time per pipe and direction.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

namespace ringlet {

/// The purpose of a pipe: a pair of ranks has one of each.
enum class ConnectionKind : uint8_t { messages, collectives };
inline constexpr ConnectionKind kConnectionKinds[] = {ConnectionKind::messages, ConnectionKind::collectives};

class Pipe {
 public:
  virtual ~Pipe() = default;

  static constexpr size_t kMostPeeked = 64;

  /// Takes bytes from `pieces`, in order, while there is room, but no more than one turn of its thread should move.
  /// Returns how many.
  virtual size_t write(const iovec* pieces, int n) noexcept = 0;

  /// Fills `pieces`, in order, with bytes that have arrived, but no more than one turn should move. Returns how many.
  virtual size_t read(const iovec* pieces, int n) noexcept = 0;
  /// Copies the next `bytes` (at most kMostPeeked) to `to`, and leaves them unread. Returns whether so many have arrived.
  virtual bool peek(void* to, size_t bytes) noexcept = 0;
  /// Reads bytes that peek() has copied.
  virtual void drop(size_t bytes) noexcept = 0;

  /// Whether the peer closed it or is gone, and all bytes that arrived have been read. why_ended() then says why.
  virtual bool ended() const noexcept = 0;
  virtual std::string why_ended() const = 0;
  /// Whether this side ended it, because the memory of `pieces` is not mapped.
  virtual bool memory_gone() const noexcept { return false; }

  /// This rank will write and read nothing more. The peer reads the bytes that were written, and then the end. Bytes
  /// that the peer still writes are discarded, and the peer need not wait for that.
  virtual void finish() noexcept = 0;

  /// Whether the peer has read all that was written, as far as this side can know, or will never read it.
  virtual bool delivered() noexcept = 0;
  /// Whether the peer has read all that was written; false if this side cannot know.
  virtual bool all_read() const noexcept { return false; }

  /// The address by which the peer reads that memory; none if it cannot.
  virtual std::optional<uint64_t> locate(const void*, size_t) const noexcept { return std::nullopt; }
  /// Where memory of the peer's lies here: the peer has located it. Null if this rank cannot read the peer's memory.
  virtual const std::byte* peer_memory(uint64_t) const noexcept { return nullptr; }
  bool reads_memory() const noexcept { return peer_memory(0) != nullptr; }
  /// Tells all peers that read this rank's memory that it may change from now on. Whether the peer has told that.
  virtual void revoke_reads() noexcept {}
  virtual bool withdrawn() const noexcept { return false; }

  /// Closes the connection.
  virtual void close() noexcept = 0;

  /// The descriptor for poll().
  virtual int descriptor() const noexcept = 0;
};

}  // namespace ringlet
