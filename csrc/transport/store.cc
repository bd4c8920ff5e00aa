#include "transport/store.h"

#include "base/error.h"

namespace ringlet {

std::string not_joined(int rank, int world, const std::string& absent) {
  return "rank " + std::to_string(rank) + " of " + std::to_string(world) + " was not joined by rank(s) " + absent +
         " in time: they may have failed, or not have started";
}

std::vector<std::string> from_all_ranks(Store& store, const std::string& place, int rank, int world,
                                        const Deadline& deadline) {
  std::vector<std::string> keys;
  for (int q = 0; q < world; ++q) keys.push_back(place + "/" + std::to_string(q));
  try {
    return store.get_all(keys, deadline);
  } catch (const Timeout&) {
    const std::string absent = ranks_where(world, [&](int q) { return !store.has(keys[q]); });
    if (absent.empty()) throw;
    throw Timeout(not_joined(rank, world, absent));
  }
}

}  // namespace ringlet
