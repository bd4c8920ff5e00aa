#include "engine/authored.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <mutex>
#include <tuple>
#include <utility>

#include "base/error.h"
#include "base/process.h"
#include "plan/schedules.h"
#include "schedule/topology.h"

namespace ringlet {
namespace {

using Key = std::tuple<int, int, std::vector<int>>;  // world, root, hosts

Key key_of(const RankInfo& info) {
  std::vector<int> hosts;
  if (info.topology != nullptr && !info.topology->one_host()) {
    for (int rank = 0; rank < info.world; ++rank) hosts.push_back(info.topology->host(rank));
  }
  return {info.world, info.root, std::move(hosts)};
}

/// The number that ranks compare. It is the same in every process, whatever other algorithms a process added before.
uint32_t id_of(std::string_view name) {
  uint32_t hash = 2166136261u;
  for (const char letter : name) hash = (hash ^ static_cast<unsigned char>(letter)) * 16777619u;
  return kFirstAuthoredId | ((hash ^ hash >> 15) % (kFirstAuthoredId - 1));
}

class Entry final : public Authored {
 public:
  Entry(Collective collective, std::string name, std::string summary, const Entry* before)
      : Authored(before != nullptr ? before->index + 1 : static_cast<int>(built_in_algorithms()), id_of(name)),
        before(before),
        name_(std::move(name)),
        summary_(std::move(summary)),
        algorithm{name_.c_str(), collective, nullptr, summary_.c_str(), Order::none, this} {}

  Schedule schedule(const RankInfo& info) const override { return of(info).ranks[static_cast<size_t>(info.rank)]; }
  bool keeps_lengths(const RankInfo& info) const override { return of(info).keeps_lengths; }

  /// With `adding` held.
  void hand_over(Key place, std::vector<Schedule> ranks) const {
    if (find(place) != nullptr) return;
    const bool keeps = ringlet::keeps_lengths(algorithm.collective, ranks);
    const Ranks* const before = schedules_.load(std::memory_order_relaxed);
    schedules_.store(new Ranks{std::move(place), std::move(ranks), keeps, before}, std::memory_order_release);
  }

  const Entry* const before;

 private:
  const std::string name_, summary_;

 public:
  const Algorithm algorithm;

 private:
  struct Ranks {
    Key place;
    std::vector<Schedule> ranks;
    bool keeps_lengths;
    const Ranks* before;
  };

  const Ranks* find(const Key& place) const {
    const Ranks* one = schedules_.load(std::memory_order_acquire);
    while (one != nullptr && one->place != place) one = one->before;
    return one;
  }

  const Ranks& of(const RankInfo& info) const {
    if (const Ranks* found = find(key_of(info))) return *found;
    throw InvalidUsage(std::string(ringlet::name(algorithm.collective)) + " algorithm \"" + name_ +
                       "\" has no schedule for a world of " + std::to_string(info.world) + " here");
  }

  mutable std::atomic<const Ranks*> schedules_{nullptr};  // the newest; never deleted, read without a lock
};

constinit OfProcess<std::mutex> adding;
std::atomic<const Entry*> newest{nullptr};

template <typename Fits>
const Algorithm* find(Fits fits) noexcept {
  for (const Entry* entry = newest.load(std::memory_order_acquire); entry != nullptr; entry = entry->before) {
    if (fits(*entry)) return &entry->algorithm;
  }
  return nullptr;
}

}  // namespace

const Algorithm& add_algorithm(Collective collective, const std::string& name, const std::string& summary) {
  if (find_algorithm(collective, name) != nullptr) {
    throw InvalidUsage(std::string(ringlet::name(collective)) + " has a built-in algorithm \"" + name +
                       "\": give the added algorithm another name");
  }
  const std::lock_guard lock(adding.get());
  const auto* entry = new Entry(collective, name, summary, newest.load(std::memory_order_relaxed));  // never deleted
  const Algorithm* other = authored_by_id(collective, entry->id);
  if (other != nullptr && name != other->name) {
    delete entry;
    throw InvalidUsage("the names \"" + name + "\" and \"" + other->name + "\" have the same hash: rename one of them");
  }
  newest.store(entry, std::memory_order_release);
  return entry->algorithm;
}

const Algorithm* find_authored(Collective collective, std::string_view name) noexcept {
  return find(
      [&](const Entry& entry) { return entry.algorithm.collective == collective && name == entry.algorithm.name; });
}

const Algorithm* authored_at(int index) noexcept {
  return find([&](const Entry& entry) { return entry.index == index; });
}

const Algorithm* authored_by_id(Collective collective, uint32_t id) noexcept {
  return find([&](const Entry& entry) { return entry.algorithm.collective == collective && entry.id == id; });
}

std::vector<const Algorithm*> authored_algorithms() {
  std::vector<const Algorithm*> all;
  find([&](const Entry& entry) {
    const Algorithm& one = entry.algorithm;
    if (find_authored(one.collective, one.name) == &one) all.push_back(&one);
    return false;
  });
  std::reverse(all.begin(), all.end());
  return all;
}

void hand_over(const Algorithm& algorithm, const AuthoredPlace& place, std::vector<Schedule> ranks) {
  for (const Schedule& schedule : ranks) {
    const auto rounds = static_cast<int>(schedule.rounds.size());
    if (rounds <= kMostAuthoredRounds && schedule.parts <= kMostAuthoredParts) continue;
    throw InvalidUsage(std::string(name(algorithm.collective)) + " algorithm \"" + algorithm.name + "\" has " +
                       std::to_string(rounds) + " rounds and " + std::to_string(schedule.parts) +
                       " parts: make it smaller, the engines support at most " + std::to_string(kMostAuthoredRounds) +
                       " rounds and " + std::to_string(kMostAuthoredParts) + " parts");
  }
  const std::lock_guard lock(adding.get());
  const bool one_host = std::all_of(place.hosts.begin(), place.hosts.end(), [](int host) { return host == 0; });
  static_cast<const Entry*>(algorithm.authored)
      ->hand_over({place.world, place.root, one_host ? std::vector<int>() : place.hosts}, std::move(ranks));
}

const Algorithm* find_any_algorithm(Collective collective, std::string_view name) noexcept {
  const Algorithm* built_in = find_algorithm(collective, name);
  return built_in != nullptr ? built_in : find_authored(collective, name);
}

const Algorithm* newest_authored() noexcept {
  const Entry* entry = newest.load(std::memory_order_acquire);
  return entry != nullptr ? &entry->algorithm : nullptr;
}

std::string all_algorithm_names(Collective collective) {
  std::string names = algorithm_names(collective);
  for (const Algorithm* one : authored_algorithms()) {
    if (one->collective == collective) names += std::string(", ") + one->name;
  }
  return names;
}

}  // namespace ringlet
