// The one version of all that ranks tell each other: handshakes, addresses, frames, and the layout of their regions.
//
// Whoever changes one of them raises it. Ranks compare it, with a digest of the algorithms, dtypes and operations, before
// anything else (comm/group_init.cc). The handshakes carry it, too, for connections that do not come from a rank.
#pragma once

#include <cstdint>

namespace ringlet {

inline constexpr uint32_t kProtocol = 12;

}  // namespace ringlet
