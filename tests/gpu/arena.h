// Guarded pieces of one device memory, with what the host expects to find there.
//
// Contract: place() lays pieces one behind the other, each with guard bytes around it and as far past a 256-byte line
// as is asked; write() brings some of them to the device as the image has them, and difference() says where the
// device's differ from the image. Offsets name bytes of the memory, so a piece, its guards and what is between pieces
// are all compared.
// Ownership: owns its memory, which grows and is kept for the next use. Thread safety: one thread at a time.
#pragma once

#include <memory>

#include "device_memory.h"

namespace gpu_check {

class Arena {
 public:
  static constexpr size_t kGuard = 128, kLine = 256;
  static constexpr std::byte kFill{0xa5};

  struct Piece {
    size_t begin;  // of the guard before it
    size_t at;
    size_t bytes;
    size_t end;  // of the guard after it
  };

  /// Forgets all pieces.
  void clear() { image_.clear(); }

  Piece place(size_t bytes, size_t shift) {
    const size_t begin = image_.size();
    const size_t at = (begin + kGuard + kLine - 1) / kLine * kLine + shift;
    image_.resize(at + bytes + kGuard, kFill);
    return {begin, at, bytes, image_.size()};
  }

  /// What the piece is to hold, again and again: on the device after write(), or what a kernel is to have made of it.
  void expect(const Piece& piece, const Bytes& content) {
    for (size_t done = 0; done < piece.bytes; done += content.size()) {
      std::memcpy(image_.data() + piece.at + done, content.data(), std::min(content.size(), piece.bytes - done));
    }
  }
  void expect_nothing(const Piece& piece) {
    std::fill_n(image_.begin() + static_cast<std::ptrdiff_t>(piece.at), piece.bytes, kFill);
  }

  /// From the first piece's guard to the last one's.
  void write(const Piece& first, const Piece& last) {
    if (!memory_ || memory_->size() < image_.size()) {
      memory_.reset();
      memory_ = std::make_unique<Memory>(image_.size() + image_.size() / 2);
    }
    ok(device().upload(memory_->data() + first.begin, image_.data() + first.begin, last.end - first.begin, beside()),
       "filling memory");
  }

  std::string difference(const Piece& first, const Piece& last) {
    seen_.resize(std::max(seen_.size(), last.end - first.begin));
    ok(device().download(seen_.data(), memory_->data() + first.begin, last.end - first.begin, beside()),
       "reading memory");
    const std::string all = gpu_check::difference(seen_.data(), image_.data() + first.begin, last.end - first.begin);
    const size_t before = first.at - first.begin;
    return all.empty() ? all : all + "(the first piece begins at " + std::to_string(before) + ")";
  }

  std::byte* address(const Piece& piece) const { return memory_->data() + piece.at; }

 private:
  std::unique_ptr<Memory> memory_;
  Bytes image_, seen_;
};

}  // namespace gpu_check
