// The rendezvous that a transport needs: a key-value store shared by all ranks. torch's own is behind it (bindings/).
#pragma once

#include <string>

#include "base/deadline.h"

namespace ringlet {

class Store {
 public:
  virtual ~Store() = default;
  virtual void set(const std::string& key, const std::string& value) = 0;
  /// Waits until the key is there. Throws Timeout at the deadline.
  virtual std::string get(const std::string& key, const Deadline& deadline) = 0;
  /// Takes a key back, so that a later group may use the name again.
  virtual void forget(const std::string& key) = 0;
};

}  // namespace ringlet
