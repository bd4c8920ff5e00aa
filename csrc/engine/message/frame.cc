#include "engine/message/frame.h"

#include <array>
#include <utility>

#include "base/error.h"

namespace ringlet {
namespace {

constexpr size_t kPieces = 63;  // which a pipe moves at once

size_t length(std::span<const iovec> pieces) {
  size_t bytes = 0;
  for (const iovec& piece : pieces) bytes += piece.iov_len;
  return bytes;
}

/// Writes to `out` the pieces after the first `skip` bytes of `pieces`. Returns how many.
size_t remainder(std::span<const iovec> pieces, size_t skip, std::span<iovec> out) {
  size_t n = 0;
  for (const iovec& piece : pieces) {
    if (n == out.size()) break;
    if (skip >= piece.iov_len) {
      skip -= piece.iov_len;
      continue;
    }
    out[n++] = {static_cast<std::byte*>(piece.iov_base) + skip, piece.iov_len - skip};
    skip = 0;
  }
  return n;
}

}  // namespace

bool FrameWriter::write(const FrameHeader& header, std::span<const iovec> payload) {
  const size_t all = sizeof header + length(payload);
  std::array<iovec, kPieces> rest;
  while (done_ < all) {
    size_t n = 0;
    if (done_ < sizeof header) {
      auto* bytes = reinterpret_cast<std::byte*>(const_cast<FrameHeader*>(&header));
      rest[n++] = {bytes + done_, sizeof header - done_};
    }
    const size_t skip = done_ < sizeof header ? 0 : done_ - sizeof header;
    n += remainder(payload, skip, std::span(rest).subspan(n));
    const size_t written = pipe_->write(rest.data(), static_cast<int>(n));
    done_ += written;
    if (written < length(std::span(rest).first(n))) return false;
  }
  done_ = 0;
  return true;
}

const FrameHeader* FrameReader::header() {
  if (have_header_) return &header_;
  if (!pipe_->peek(&header_, sizeof header_)) return nullptr;
  if (header_.magic != FrameHeader::kMagic) throw PeerLost("sent bytes that are not a ringlet frame");
  have_header_ = true;
  return &header_;
}

bool FrameReader::has_more() {
  FrameHeader next;
  return !have_header_ && pipe_->peek(&next, sizeof next);
}

bool FrameReader::payload(std::span<const iovec> payload) {
  if (!std::exchange(dropped_, true)) pipe_->drop(sizeof header_);
  std::array<iovec, kPieces> rest;
  while (taken_ < header_.bytes) {
    const size_t n = remainder(payload, taken_, rest);
    const size_t got = pipe_->read(rest.data(), static_cast<int>(n));
    taken_ += got;
    if (got < length(std::span(rest).first(n))) return false;
  }
  taken_ = 0;
  have_header_ = dropped_ = false;
  return true;
}

}  // namespace ringlet
