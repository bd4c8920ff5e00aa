// NCCL on virtual ranks, and its own all-reduce to compare with: all ranks' calls are one group of one thread, as NCCL
// demands of ranks that share a device.
//
// Contract: the constructor throws where NCCL refuses or is not done in time; a call only enqueues. What NCCL does not
// come back from is left to a thread of its own. Ownership: owns the communicators; aborts them at its end.
// Thread safety: one thread at a time.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "gpu/nccl_api.h"

namespace gpu_check {

using ringlet::NcclApi;
using ringlet::NcclComm;
using ringlet::NcclStream;

/// Throws what `act` throws, and Timeout where it is not done in time: it goes on then, so it must own what it uses.
void within(std::chrono::seconds limit, const std::string& what, std::function<void()> act);

/// How many processors a rank's NCCL kernels may take: as many as a pull kernel would, or what NCCL_MAX_CTAS says,
/// which NCCL goes by then.
int most_ctas(int world);

class NcclRanks {
 public:
  /// Null, and a line that says why, where NCCL refuses and RINGLET_NCCL_LIBRARY names none, or /nonexistent. What that
  /// names must serve: then this throws.
  static std::unique_ptr<NcclRanks> make(int world);

  explicit NcclRanks(int world);
  ~NcclRanks();
  NcclRanks(const NcclRanks&) = delete;
  NcclRanks& operator=(const NcclRanks&) = delete;

  struct Buffers {
    const void* input;
    void* output;
    NcclStream stream;
  };
  /// Of `count` float32 of every rank.
  void sum_of_floats(const std::vector<Buffers>& ranks, size_t count) const;

  /// One group for all ranks; `act` calls functions of NCCL, and throws nothing. Throws what NCCL refused.
  using Take = std::function<void(int result)>;
  void as_one(const std::function<void(const NcclApi&, const Take&)>& act) const;

  const NcclApi& api() const { return api_; }
  const std::vector<NcclComm>& comms() const { return comms_; }  ///< by rank

 private:
  const NcclApi& api_;
  std::vector<NcclComm> comms_;
};

}  // namespace gpu_check
