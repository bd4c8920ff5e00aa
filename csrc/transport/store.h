// The rendezvous that a transport needs: a key-value store shared by all ranks. torch's own is behind it (bindings/).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/deadline.h"

namespace ringlet {

class Store {
 public:
  virtual ~Store() = default;
  virtual void set(const std::string& key, const std::string& value) = 0;
  /// Waits until all keys are there; their values in that order. Throws Timeout at the deadline.
  virtual std::vector<std::string> get_all(const std::vector<std::string>& keys, const Deadline& deadline) = 0;
  /// Adds to a number that starts at 0; what it is then.
  virtual int64_t add(const std::string& key, int64_t more) = 0;
  virtual bool has(const std::string& key) = 0;
  /// Takes a key back, so that a later group may use the name again.
  virtual void forget(const std::string& key) = 0;
};

/// What each rank has set at `place`/RANK. Throws Timeout that names the ranks which have set nothing.
std::vector<std::string> from_all_ranks(Store& store, const std::string& place, int rank, int world,
                                        const Deadline& deadline);

/// What rank `rank` raises that has waited in vain for `absent`, as "1, 3".
std::string not_joined(int rank, int world, const std::string& absent);

}  // namespace ringlet
