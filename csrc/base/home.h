// Where the value of a chunk lies. Plain data, the same on the host and in kernels.
#pragma once

#include <cstdint>

namespace ringlet {

/// `work`: a rank's own memory for what is none of its output. `incoming`: where a message lies until it is combined.
/// All from staging_a on are staging buffers, which peers read.
enum class Home : uint8_t { none, input, output, work, incoming, staging_a, staging_b };

inline bool is_staging(Home home) { return home >= Home::staging_a; }

}  // namespace ringlet
