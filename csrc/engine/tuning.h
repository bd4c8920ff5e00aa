// The sizes at which the pull engine changes its way: the built-in values, and what a table has measured instead.
//
// What is best depends on the processor (docs/decisions/0052-sizes-are-measured-by-processor.md). A table's line is
//   tuned  staged_segment_bytes  512KiB  processor GenuineIntel-6-207    # a comment
// and counts if rank 0 runs on that processor, or the line names none. All ranks of a group have rank 0's table and
// processor (comm/group_init.h), so all have the same values. Sizes are of the schedule's whole buffer.
// Pure values. Thread safety: any.
#pragma once

#include <cstddef>
#include <limits>
#include <string_view>
#include <utility>

namespace ringlet {

struct Tuning {
  // With two ranks staging pays for longer messages: only one rank writes a staged line, but in place every line of both
  // tensors moves between their caches again and again. But at 1 MiB
  // in place is faster (benchmarks/results/2026-11-24-intel-xeon-2-cores-calibrated.md).
  static constexpr size_t kSmallBytes = size_t{32} << 10;        ///< up to this size every message is staged, also in
                                                                 ///< registered memory
  static constexpr size_t kSmallBytesOfTwo = size_t{512} << 10;  ///< the same with two ranks
  // Two staging buffers of a segment fit in a core's second-level cache. In place nothing is staged, and a segment should
  // be larger than that cache: a core reads a line faster when the line has left the cache of the core that wrote it.
  static constexpr size_t kStagedSegmentBytes = size_t{256} << 10;  ///< a segment, with staging buffers
  static constexpr size_t kInPlaceSegmentBytes = size_t{4} << 20;   ///< a segment in place, if no rank uses a staging
                                                                    ///< buffer
  // Results of messages from this size on have left the cache before the caller reads them.
  static constexpr size_t kStreamingBytes = size_t{8} << 20;  ///< from this size on, results that nobody reads again
                                                              ///< bypass the cache
  // With fewer bytes what is staged past the caches gains nothing (engine/pull/staging_trials.h;
  // benchmarks/results/2026-11-26-amd-epyc-2-cores-short-copies.md).
  static constexpr size_t kTimedCopyBytes = size_t{4} << 10;  ///< from this size on, ranks try to write staging buffers
                                                              ///< past the cache, and do so if that is quicker

  size_t small_bytes = kSmallBytes;  ///< up to this size a message is staged even if registered
  size_t small_bytes_of_two = kSmallBytesOfTwo;
  size_t staged_segment_bytes = kStagedSegmentBytes;
  size_t in_place_segment_bytes = kInPlaceSegmentBytes;
  size_t streaming_bytes =
      kStreamingBytes;  ///< from this size on results go past the cache, if nobody reads them again
  size_t hand_over_bytes = std::numeric_limits<size_t>::max();  ///< up to this size what a peer reads next is hinted
  size_t timed_copy_bytes = kTimedCopyBytes;  ///< from this size on the ranks try to stage past the caches

  size_t small(int world) const { return world == 2 ? small_bytes_of_two : small_bytes; }
};

/// By the name that a table uses. A segment must be a multiple of kSegmentUnit.
inline constexpr size_t kSegmentUnit = 4096;
inline constexpr std::pair<std::string_view, size_t Tuning::*> kTuned[] = {
    {"small_bytes", &Tuning::small_bytes},
    {"small_bytes_of_two", &Tuning::small_bytes_of_two},
    {"staged_segment_bytes", &Tuning::staged_segment_bytes},
    {"in_place_segment_bytes", &Tuning::in_place_segment_bytes},
    {"streaming_bytes", &Tuning::streaming_bytes},
    {"hand_over_bytes", &Tuning::hand_over_bytes},
    {"timed_copy_bytes", &Tuning::timed_copy_bytes},
};

}  // namespace ringlet
