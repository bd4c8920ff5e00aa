#include "engine/message/frame.h"

#include <algorithm>
#include <cstring>

#include "base/error.h"

namespace ringlet {
namespace {

constexpr size_t kPieces = 64;  // in one system call

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
    if (written == 0) return false;
    done_ += written;
  }
  done_ = 0;
  return true;
}

bool FrameReader::fill() {
  if (begin_ == end_) begin_ = end_ = 0;
  if (end_ == kBuffer) {
    std::memmove(buffer_.data(), buffer_.data() + begin_, end_ - begin_);
    end_ -= begin_;
    begin_ = 0;
  }
  const iovec room{buffer_.data() + end_, kBuffer - end_};
  const size_t got = pipe_->read(&room, 1);
  end_ += got;
  return got > 0;
}

const FrameHeader* FrameReader::header() {
  if (have_header_) return &header_;
  while (end_ - begin_ < sizeof header_) {
    if (!fill()) return nullptr;
  }
  std::memcpy(&header_, buffer_.data() + begin_, sizeof header_);
  begin_ += sizeof header_;
  if (header_.magic != FrameHeader::kMagic) throw PeerLost("sent bytes that are not a ringlet frame");
  have_header_ = true;
  return &header_;
}

bool FrameReader::payload(std::span<const iovec> payload) {
  const size_t all = header_.bytes;
  std::array<iovec, kPieces> rest;
  while (taken_ < all) {
    size_t n = remainder(payload, taken_, std::span(rest).first(kPieces - 1));
    if (begin_ < end_) {  // first the bytes that were read together with the header
      const size_t piece = std::min(rest[0].iov_len, end_ - begin_);
      std::memcpy(rest[0].iov_base, buffer_.data() + begin_, piece);
      begin_ += piece;
      taken_ += piece;
      continue;
    }
    begin_ = end_ = 0;
    const size_t asked = length(std::span(rest).first(n));
    if (asked == all - taken_) rest[n++] = {buffer_.data(), kBuffer};  // the next header, in the same system call
    const size_t got = pipe_->read(rest.data(), static_cast<int>(n));
    if (got == 0) return false;
    taken_ += std::min(got, asked);
    end_ = got - std::min(got, asked);
  }
  taken_ = 0;
  have_header_ = false;
  return true;
}

}  // namespace ringlet
