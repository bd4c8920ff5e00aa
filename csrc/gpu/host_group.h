// What a group's part on a GPU needs of the group, which serves host tensors.
//
// Ownership: the group outlives its part. Thread safety: run() is a call of the group's; all others from any thread.
#pragma once

#include <chrono>
#include <vector>

#include "engine/call.h"
#include "engine/health.h"
#include "engine/p2p.h"
#include "engine/selector.h"

namespace ringlet {

class HostGroup {
 public:
  virtual int rank() const = 0;
  virtual int world() const = 0;
  /// Of a call that names none.
  virtual std::chrono::milliseconds timeout() const = 0;
  /// What `auto` means; the same on all ranks.
  virtual const Selector& selector() const = 0;
  /// The host of each rank, numbered by first appearance.
  virtual const std::vector<int>& host_of_rank() const = 0;

  virtual void run(Call call) = 0;
  /// Throws InvalidUsage for a call that cannot be right on this rank.
  virtual void check(const Call& call) const = 0;
  virtual void check(const Message& message) const = 0;

  /// The group's first error, and what the peers have told.
  virtual Health& health() = 0;

 protected:
  ~HostGroup() = default;
};

}  // namespace ringlet
