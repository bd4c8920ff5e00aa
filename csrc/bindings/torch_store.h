// torch's store behind the transport's rendezvous interface.
#pragma once

#include <algorithm>
#include <chrono>
#include <thread>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "base/error.h"
#include "comm/group_init.h"
#include "transport/store.h"

namespace ringlet {

/// Every failure of the store is PeerLost: the process that serves it has ended, or this rank cannot reach it.
class TorchStore final : public Store {
 public:
  explicit TorchStore(c10::intrusive_ptr<c10d::Store> store) : store_(std::move(store)) {}

  /// From now on a thread that waits here raises the error that another rank published under the same `place`.
  void share_failures(const std::string& place) { failure_ = place; }
  void tell_failure(int rank, const Error& error) noexcept;

  void set(const std::string& key, const std::string& value) override;
  /// Waits until the key is there. Throws Timeout at the deadline.
  std::string get(const std::string& key, const Deadline& deadline);
  std::vector<std::string> get_all(const std::vector<std::string>& keys, const Deadline& deadline) override;
  int64_t add(const std::string& key, int64_t more) override;
  void forget(const std::string& key) override;
  bool has(const std::string& key) override;
  void raise_failure() override;
  std::string host() const override;

 private:
  void await(const std::vector<std::string>& keys, const Deadline& deadline);
  size_t first_missing(const std::vector<std::string>& keys, size_t from);

  c10::intrusive_ptr<c10d::Store> store_;
  std::string failure_;  // the key under which ranks publish their errors; empty: none
};

/// Runs join() of comm/group_init.h. If it fails on one rank, the other ranks raise the same error.
std::unique_ptr<Engine> join(const c10::intrusive_ptr<c10d::Store>& store, const std::string& name,
                             const Member& member, Carrier carrier, std::chrono::milliseconds timeout);

}  // namespace ringlet
