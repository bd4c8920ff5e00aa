// What a group's part on a GPU needs of the group, which serves host tensors.
//
// Ownership: the group outlives its part. Thread safety: run() is a call of the group's; all others from any thread.
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "base/error.h"
#include "engine/call.h"
#include "engine/p2p_transport.h"
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

  /// The error that poisoned the group, if one did.
  virtual std::optional<ErrorKind> failure() const = 0;
  /// Throws it.
  virtual void raise_if_failed() = 0;
  /// The same, and throws if a peer has reported an error or has ended.
  virtual void poll_failures() = 0;
  /// Poisons the group and tells the peers. Needs no memory.
  virtual void poison(ErrorKind kind, const std::string& message) noexcept = 0;
  void poison(const Error& error) noexcept {
    poison(error.kind(), in_words([&] { return std::string(error.what()); }));
  }

 protected:
  ~HostGroup() = default;
};

}  // namespace ringlet
