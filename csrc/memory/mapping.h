// A mapping of a file: one mmap, aligned for huge pages. The destructor unmaps it.
//
// Ownership: owns the address range, not the descriptor. Thread safety: immutable once made, but for a forked child's
// make_private().
#pragma once

#include <cstddef>
#include <utility>

namespace ringlet {

class Mapping {
 public:
  enum class Access { read_only, read_write };

  Mapping() = default;
  /// Maps `bytes` of `fd` from its start. Throws ResourceError.
  Mapping(int fd, size_t bytes, Access access);
  Mapping(Mapping&& other) noexcept : base_(std::exchange(other.base_, nullptr)), bytes_(other.bytes_) {}
  Mapping& operator=(Mapping&& other) noexcept {
    std::swap(base_, other.base_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~Mapping();

  /// In a forked child, for a mapping of `fd`: what this process writes from now on reaches no other process. If the
  /// kernel refuses that, a write ends this process.
  void make_private(int fd) noexcept;

  std::byte* base() const { return base_; }
  size_t bytes() const { return bytes_; }

 private:
  std::byte* base_ = nullptr;
  size_t bytes_ = 0;
};

/// A file descriptor. The destructor closes it.
class Descriptor {
 public:
  explicit Descriptor(int fd = -1) : fd_(fd) {}
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Descriptor();

  int get() const { return fd_; }
  bool valid() const { return fd_ >= 0; }

 private:
  int fd_;
};

}  // namespace ringlet
