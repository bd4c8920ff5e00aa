// Frames go over a pipe: a header and a payload, written and read piece by piece, without waiting.
//
// The reader never believes a length: the caller that asks for a payload knows how long it must be. The caller passes
// the same frame again until it is complete. Ownership: the pipe and the payload belong to the caller.
// Thread safety: one thread at a time per reader and per writer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/protocol.h"
#include "transport/pipe.h"

namespace ringlet {

enum class FrameKind : uint32_t {
  data,        ///< a step of a collective; if `detail` is not 0, so long, and the payload says where its chunks lie
  message,     ///< a point-to-point message; if `segment` is 1, it is to be read in place, at `sequence`
  error,       ///< why rank `index` failed: `detail` is the ErrorKind, the payload its text
  goodbye,     ///< the sender left the group
  waiting,     ///< the sender has waited long: `detail` is the rank that it suspects; -1: it waits no longer
  taken,       ///< the sender has read message `index` of `segment` in the receiver's memory
  in_message,  ///< the sender has waited long in the message that the payload names; empty: it waits no longer
};

struct FrameHeader {
  static constexpr uint32_t kMagic = 0x524e4700 | kProtocol;  // "RNG"
  static constexpr size_t kMostText = 1536;                   // bytes of an error

  uint32_t magic = kMagic;
  FrameKind kind = FrameKind::data;
  uint64_t bytes = 0;      ///< of the payload
  uint64_t signature = 0;  ///< data: engine/call.h; message: the dtype
  uint64_t count = 0;      ///< of elements: of the call, of the whole message
  uint64_t call = 0;       ///< data: how many collectives the sender ran before
  uint64_t sequence = 0;   ///< data: the call's number, for people; message: see FrameKind
  int64_t detail = 0;      ///< data: see FrameKind; message: the tag
  uint32_t segment = 0;
  uint32_t index = 0;  ///< how many messages of the segment the sender sent to this peer before
};
static_assert(sizeof(FrameHeader) == Pipe::kMostPeeked);

class FrameWriter {
 public:
  explicit FrameWriter(Pipe& pipe) : pipe_(&pipe) {}

  /// Writes while there is room. Returns whether the frame is complete. `payload` is the whole payload, in every call.
  bool write(const FrameHeader& header, std::span<const iovec> payload);
  /// Part of a frame is written.
  bool midway() const { return done_ > 0; }
  size_t done() const { return done_; }

 private:
  Pipe* pipe_;
  size_t done_ = 0;  // bytes of header and payload
};

class FrameReader {
 public:
  explicit FrameReader(Pipe& pipe) : pipe_(&pipe) {}

  /// The header of the next frame; null if it has not arrived. Throws PeerLost if the bytes are not a header.
  const FrameHeader* header();
  /// Reads the bytes of the payload that have arrived. Returns whether the payload is complete; header() is then about
  /// the next frame. `payload` is the whole payload, header()->bytes long, in every call.
  bool payload(std::span<const iovec> payload);
  /// A header has been read whose payload is not complete. Until payload() is called, the header stays in the pipe.
  bool waits() const { return have_header_; }
  size_t taken() const { return taken_; }
  /// Whether the header of another frame is here: then the pipe may have ended, but its frames have not.
  bool has_more();

 private:
  Pipe* pipe_;
  bool have_header_ = false;
  bool dropped_ = false;  // the header, from the pipe
  size_t taken_ = 0;      // of the payload
  FrameHeader header_;
};

}  // namespace ringlet
