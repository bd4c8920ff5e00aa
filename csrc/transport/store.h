// The key-value store through which ranks find each other. bindings/ implements it by torch's store.
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
  /// Waits until all keys are there. Returns their values in the same order. Throws Timeout at the deadline.
  virtual std::vector<std::string> get_all(const std::vector<std::string>& keys, const Deadline& deadline) = 0;
  /// Adds to a number that starts at 0. Returns the sum.
  virtual int64_t add(const std::string& key, int64_t more) = 0;
  virtual bool has(const std::string& key) = 0;
  /// Throws the failure that another rank has told, if there is one. A wait outside of the store asks now and then.
  virtual void raise_failure() {}
  /// The name or address of the host that serves the store; "" if it is not known.
  virtual std::string host() const { return ""; }
  /// Deletes a key, so that a later group may use the name again.
  virtual void forget(const std::string& key) = 0;
};

/// The values that the ranks have set at `place`/RANK. Throws Timeout that names the ranks without one.
std::vector<std::string> from_all_ranks(Store& store, const std::string& place, int rank, int world,
                                        const Deadline& deadline);

/// The message of the Timeout of `rank`, which has waited for the ranks `absent`, such as "1, 3".
std::string not_joined(int rank, int world, const std::string& absent);

/// "1, 4, 5": the ranks below `world` for which `holds` does.
template <typename Holds>
std::string ranks_where(int world, const Holds& holds) {
  std::string text;
  for (int rank = 0; rank < world; ++rank) {
    if (holds(rank)) text += (text.empty() ? "" : ", ") + std::to_string(rank);
  }
  return text;
}

}  // namespace ringlet
