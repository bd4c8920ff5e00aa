// A copy of bytes, with a hint of who reads them next.
//
// Thread safety: pure, with reduce.h's table of kernels.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ringlet {

/// Who reads the results next: a hint in which cache they should be. It does not change the results.
enum class NextReader : uint8_t {
  self,    ///< this processor core, or unknown
  peer,    ///< another core: dst, as soon as this returns
  nobody,  ///< not soon: non-temporal stores, if the processor has them
};

/// memcpy with a hint; regions must not overlap.
void copy_bytes(std::byte* dst, const std::byte* src, size_t bytes, NextReader next = NextReader::self) noexcept;

}  // namespace ringlet
