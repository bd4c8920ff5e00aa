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
  /// Waits until the key is there. Throws Timeout at the deadline.
  virtual std::string get(const std::string& key, const Deadline& deadline) = 0;
  /// The same for many keys, in their order.
  virtual std::vector<std::string> get_all(const std::vector<std::string>& keys, const Deadline& deadline) = 0;
  /// Adds to a number that starts at 0; what it is then.
  virtual int64_t add(const std::string& key, int64_t more) = 0;
  /// Takes a key back, so that a later group may use the name again.
  virtual void forget(const std::string& key) = 0;
};

}  // namespace ringlet
