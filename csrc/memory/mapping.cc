#include "memory/mapping.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>

#include "base/error.h"

namespace ringlet {
namespace {
constexpr size_t kHugePage = size_t{2} << 20;
}

Mapping::Mapping(int fd, size_t bytes, Access access) : bytes_(bytes) {
  // More than `bytes`, so that the file can begin at a huge page boundary. Otherwise the kernel maps 4 KiB pages.
  void* reserved = ::mmap(nullptr, bytes + kHugePage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (reserved == MAP_FAILED) {
    throw_errno("cannot reserve " + std::to_string(bytes >> 20) + " MiB of addresses",
                "lower RINGLET_HEAP_MIB or raise the limit on virtual memory (ulimit -v)");
  }
  const auto start = reinterpret_cast<uintptr_t>(reserved);
  const uintptr_t aligned = (start + kHugePage - 1) / kHugePage * kHugePage;
  if (aligned > start) ::munmap(reserved, aligned - start);
  if (const size_t tail = start + kHugePage - aligned; tail > 0) {
    ::munmap(reinterpret_cast<void*>(aligned + bytes), tail);
  }
  const int protection = access == Access::read_only ? PROT_READ : PROT_READ | PROT_WRITE;
  void* mapped = ::mmap(reinterpret_cast<void*>(aligned), bytes, protection, MAP_SHARED | MAP_FIXED, fd, 0);
  if (mapped == MAP_FAILED) {
    const int code = errno;
    ::munmap(reinterpret_cast<void*>(aligned), bytes);
    errno = code;
    throw_errno("cannot map a registered heap of " + std::to_string(bytes >> 20) + " MiB");
  }
  ::madvise(mapped, bytes, MADV_HUGEPAGE);  // advice: a kernel without it maps small pages
  base_ = static_cast<std::byte*>(mapped);
}

Mapping::~Mapping() {
  if (base_ != nullptr) ::munmap(base_, bytes_);
}

void Mapping::make_private(int fd) noexcept {
  const void* mapped = ::mmap(base_, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE, fd, 0);
  // Where the kernel counts each private page as used (vm.overcommit_memory=2) there may be no room.
  if (mapped == MAP_FAILED) ::mprotect(base_, bytes_, PROT_READ);
}

Descriptor::~Descriptor() {
  if (fd_ >= 0) ::close(fd_);
}

}  // namespace ringlet
