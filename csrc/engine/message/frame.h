// Frames: what goes over a pipe, a header and a payload; written and read piece by piece, without waiting.
//
// The reader never believes a length: whoever asks for a payload knows how long it must be. Both sides are resumable:
// the same frame is offered again until it is through. Ownership: the pipe and the payload belong to the caller.
// Thread safety: one thread at a time per reader and per writer.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "transport/pipe.h"

namespace ringlet {

enum class FrameKind : uint32_t {
  data,        ///< a step of a collective
  message,     ///< a point-to-point message
  error,       ///< why rank `index` gave the group up: `detail` is the ErrorKind, the payload its text
  goodbye,     ///< the sender left the group
  waiting,     ///< the sender has waited for long: `detail` is the rank that it takes for the one to blame
  in_message,  ///< the sender has waited for long in the message that the payload names; none: it does no more
};

struct FrameHeader {
  static constexpr uint32_t kMagic = 0x524e4702;  // "RNG", version 2
  static constexpr size_t kMostText = 1536;       // bytes of an error

  uint32_t magic = kMagic;
  FrameKind kind = FrameKind::data;
  uint64_t bytes = 0;      ///< of the payload
  uint64_t signature = 0;  ///< data: engine/call.h; message: the dtype
  uint64_t count = 0;      ///< of elements: of the call, of the whole message
  uint64_t call = 0;       ///< data: how many collectives the sender ran before
  uint64_t sequence = 0;   ///< data: the call's number, for people
  int64_t detail = 0;      ///< message: the tag
  uint32_t segment = 0;
  uint32_t index = 0;  ///< within the segment: how many messages went this way before
};
static_assert(sizeof(FrameHeader) == 64);

class FrameWriter {
 public:
  explicit FrameWriter(Pipe& pipe) : pipe_(&pipe) {}

  /// Writes what there is room for; true once the frame is out. `payload` is all of it, in every call.
  bool write(const FrameHeader& header, std::span<const iovec> payload);
  /// Some of a frame is out, not all.
  bool midway() const { return done_ > 0; }
  size_t done() const { return done_; }

 private:
  Pipe* pipe_;
  size_t done_ = 0;  // bytes of header and payload
};

class FrameReader {
 public:
  explicit FrameReader(Pipe& pipe) : pipe_(&pipe) {}

  /// The next frame's header; null while it has not arrived. Throws PeerLost for one that is none.
  const FrameHeader* header();
  /// Reads what has arrived of the payload; true once it is complete, and the next frame's turn. `payload` is all of
  /// it, header()->bytes long, in every call.
  bool payload(std::span<const iovec> payload);
  /// A header is there whose payload nobody has asked for, or not to the end.
  bool waits() const { return have_header_; }
  size_t taken() const { return taken_; }
  /// Whether a whole header has been read ahead: then the pipe may have ended, but its frames have not.
  bool has_more() const { return end_ - begin_ >= sizeof(FrameHeader); }

 private:
  static constexpr size_t kBuffer = 4096;  // small frames come whole; of large ones at most this much is copied twice

  bool fill();

  Pipe* pipe_;
  size_t begin_ = 0, end_ = 0;  // of what is buffered
  bool have_header_ = false;
  size_t taken_ = 0;  // of the payload
  FrameHeader header_;
  std::array<std::byte, kBuffer> buffer_;
};

}  // namespace ringlet
