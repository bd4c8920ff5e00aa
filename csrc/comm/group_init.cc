#include "comm/group_init.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <numeric>
#include <vector>

#include "base/error.h"
#include "base/log.h"
#include "base/processor.h"
#include "base/protocol.h"
#include "engine/call.h"
#include "engine/given_table.h"
#include "engine/message/message_engine.h"
#include "engine/pull/pull_engine.h"
#include "engine/selector.h"
#include "transport/address.h"
#include "transport/mesh.h"
#include "transport/shared_memory.h"
#include "transport/token.h"

namespace ringlet {
namespace {

// Separates two parts of an answer. No environment variable can contain it.
constexpr char kPart = '\0';

/// Names this host to the others. RINGLET_HOST_ID splits one host into several, for tests.
std::string own_host() {
  const char* given = std::getenv("RINGLET_HOST_ID");
  return given != nullptr && *given != '\0' ? given : std::to_string(host_identity());
}

class Rendezvous {
 public:
  Rendezvous(Store& store, const std::string& name, const Member& member, const Deadline& deadline)
      : store_(store), name_(name), member_(member), deadline_(deadline) {}

  /// All ranks' answers to one question, by rank.
  std::vector<std::string> exchange(const std::string& what, const std::string& mine) {
    const std::string place = name_ + "/" + what, read = place + "/read";
    store_.set(place + "/" + std::to_string(member_.rank), mine);
    std::vector<std::string> all = from_all_ranks(store_, place, member_.rank, member_.world, deadline_);
    // The last rank that has read all answers deletes them.
    if (store_.add(read, 1) == member_.world) {
      for (int q = 0; q < member_.world; ++q) store_.forget(place + "/" + std::to_string(q));
      store_.forget(read);
    }
    return all;
  }

  /// The last step of making a group: it returns when all ranks have come here. If a rank fails before, no rank has
  /// the group: each raises that rank's error.
  void commit() {
    exchange("made", "");
    part();
  }

  /// Rank 0 waits here for all others, because its process may serve the store, which ends with it.
  void part() {
    const std::string place = name_ + "/parted";
    store_.set(place + "/" + std::to_string(member_.rank), "");
    if (member_.rank > 0) return;
    from_all_ranks(store_, place, member_.rank, member_.world, deadline_);
    for (int q = 0; q < member_.world; ++q) store_.forget(place + "/" + std::to_string(q));
  }

 private:
  Store& store_;
  const std::string& name_;
  const Member& member_;
  const Deadline& deadline_;
};

/// Names this build to the others: what it says to them, and what the numbers in it mean.
std::string own_build() { return std::to_string(kProtocol) + '.' + std::to_string(meaning_of_signatures()); }

/// A rank's first answer: its build, host and user. Rank 0 adds what applies to all ranks: RINGLET_TOPOLOGY, its
/// processor and its user's table.
std::string introduction(int rank) {
  const char* wish = rank == 0 ? std::getenv("RINGLET_TOPOLOGY") : nullptr;
  GivenTable table = rank == 0 ? given_table() : GivenTable{};
  try {  // what rank 0 alone cannot read, no rank shall
    if (table.problem.empty()) Selector(table.text, table.origin, processor_model());
  } catch (const InvalidUsage& error) {
    table.problem = error.what();
  }
  return own_build() + kPart + own_host() + kPart + std::to_string(::geteuid()) + kPart +
         (wish != nullptr ? wish : "") + kPart + processor_model() + kPart + table.origin + kPart + table.problem +
         kPart + table.text;
}

/// Removes and returns the first part.
std::string take_part(std::string& parts) {
  const size_t end = parts.find(kPart);
  std::string part = parts.substr(0, end);
  parts.erase(0, end == parts.npos ? end : end + 1);
  return part;
}

struct Agreed {
  bool topology_ignored;  ///< every rank counts as a host of its own, so that the ranks' own order is kept
  Selector selector;
};

/// Refuses ranks of different builds, which would take one another's numbers for something else.
void check_builds(const std::vector<std::string>& builds) {
  for (size_t rank = 1; rank < builds.size(); ++rank) {
    if (builds[rank] == builds[0]) continue;
    throw InvalidUsage("rank " + std::to_string(rank) +
                       " runs another build of ringlet than rank 0 (they differ in algorithms, dtypes, operations or "
                       "messages): install the same build for all ranks");
  }
}

/// Refuses ranks of different users on one host, because they cannot read each other's shared memory.
void check_users(const std::vector<int>& hosts, const std::vector<std::string>& users) {
  for (size_t rank = 0; rank < hosts.size(); ++rank) {
    const auto first = static_cast<size_t>(std::find(hosts.begin(), hosts.end(), hosts[rank]) - hosts.begin());
    if (users[first] == users[rank]) continue;
    throw InvalidUsage("rank " + std::to_string(rank) + " runs as user " + users[rank] + ", rank " +
                       std::to_string(first) + " as user " + users[first] +
                       "; shared memory joins processes of one user: run all ranks as one user, or choose "
                       "transport=\"tcp\"");
  }
}

/// The parts of rank 0's answer after its build, host and user.
Agreed read_agreed(std::string told) {
  const std::string wish = take_part(told), processor = take_part(told), origin = take_part(told),
                    problem = take_part(told);
  if (!wish.empty() && wish != "ignore") throw InvalidUsage("RINGLET_TOPOLOGY=\"" + wish + "\" is not \"ignore\"");
  if (!problem.empty()) throw InvalidUsage(problem);
  return {!wish.empty(), Selector(told, origin, processor)};
}

/// The group's name for people, without the part that makes each rendezvous unique (ringlet/group_key.py).
std::string title_of(const std::string& name) {
  constexpr std::string_view kPrefix = "ringlet/", kDigits = "0123456789abcdef";
  std::string title = name.substr(name.starts_with(kPrefix) ? kPrefix.size() : 0);
  for (size_t begin = 0; begin < title.size();) {
    const size_t end = std::min(title.find('/', begin), title.size());
    const bool drawn = end - begin == 32 && title.find_first_not_of(kDigits, begin) >= end;
    const bool members = begin < end && title[begin] == '[';  // of a sub-group
    if (drawn || members) {
      title.erase(begin > 0 ? begin - 1 : 0, end - begin + 1);
    } else {
      begin = end + 1;
    }
  }
  return title;
}

std::vector<int> each_apart(int world) {
  std::vector<int> numbers(static_cast<size_t>(world));
  std::iota(numbers.begin(), numbers.end(), 0);
  return numbers;
}

bool one_host(const std::vector<int>& hosts) {
  return std::all_of(hosts.begin(), hosts.end(), [](int host) { return host == 0; });
}

/// The transport of the ranks on this rank's host; null if this rank is alone there.
std::unique_ptr<Transport> connect_host(Store& store, const std::string& name, const std::vector<int>& hosts, int rank,
                                        const Deadline& deadline) {
  const auto local_rank = static_cast<int>(std::count(hosts.begin(), hosts.begin() + rank, hosts[rank]));
  const auto local_world = static_cast<int>(std::count(hosts.begin(), hosts.end(), hosts[rank]));
  if (local_world == 1) return nullptr;
  const std::string host = name + "/host/" + std::to_string(hosts[rank]);
  try {
    return connect_shared_memory(store, host, local_rank, local_world, deadline, Rings::all);
  } catch (const Error& error) {
    if (error.reported()) throw;  // of another host, maybe
    const auto here = [&](int q) { return hosts[q] == hosts[rank]; };
    rethrow(error.kind(), "among ranks " + ranks_where(static_cast<int>(hosts.size()), here) +
                              ", which share a host and count from 0 there: " + error.what());
  }
}

}  // namespace

const char* name(Carrier carrier) noexcept {
  return carrier == Carrier::automatic ? "auto" : carrier == Carrier::shared_memory ? "shared_memory" : "tcp";
}

Carrier parse_carrier(std::string_view name) {
  if (name == "auto") return Carrier::automatic;
  if (name == "shared_memory") return Carrier::shared_memory;
  if (name == "tcp") return Carrier::tcp;
  throw InvalidUsage("transport must be one of auto, shared_memory, tcp, threads, got \"" + std::string(name) + '"');
}

std::unique_ptr<Engine> join(Store& store, const std::string& name, const Member& member, Carrier carrier,
                             const Deadline& deadline) {
  const auto [rank, world] = member;
  Rendezvous rendezvous(store, name, member, deadline);
  std::vector<std::string> told = rendezvous.exchange("introduction", introduction(rank)), builds, names, users;
  for (std::string& each : told) {
    builds.push_back(take_part(each));
    names.push_back(take_part(each));
    users.push_back(take_part(each));
  }
  std::vector<int> hosts(static_cast<size_t>(world), 0);
  if (carrier != Carrier::shared_memory) hosts = numbered_by_first_rank(names);
  auto [topology_ignored, selector] = [&] {
    try {
      check_builds(builds);
      if (carrier != Carrier::tcp) check_users(hosts, users);
      return read_agreed(told[0]);
    } catch (const InvalidUsage&) {  // on all ranks alike
      rendezvous.part();
      throw;
    }
  }();
  const auto committed = [&](std::unique_ptr<Engine> engine) {
    engine->calls().set_source({rank, world, title_of(name)});
    rendezvous.commit();
    return engine;
  };
  if (carrier == Carrier::shared_memory || (carrier == Carrier::automatic && one_host(hosts))) {
    auto transport = connect_shared_memory(store, name, rank, world, deadline);
    return committed(std::make_unique<PullEngine>(std::move(transport), std::move(selector)));
  }
  Mesh::Setup setup;
  setup.timed_copy_bytes = selector.tuning().timed_copy_bytes;
  setup.group = title_of(name);
  setup.rank = rank;
  setup.world = world;
  const Token token = rank == 0 ? random_token() : Token{};
  const std::string key(token.begin(), token.end());
  setup.addresses = rendezvous.exchange("address", key + Mesh::address(store.host()));
  std::copy_n(setup.addresses[0].begin(), setup.key.size(), setup.key.begin());
  for (std::string& address : setup.addresses) address.erase(0, setup.key.size());
  if (carrier == Carrier::automatic) {
    setup.local = connect_host(store, name, hosts, rank, deadline);
    setup.hosts = hosts;
  } else {
    setup.hosts = each_apart(world);
  }
  const char* transport = carrier == Carrier::tcp ? "tcp" : "shared_memory+tcp";
  Topology topology(topology_ignored ? each_apart(world) : hosts);
  return committed(std::make_unique<MessageEngine>(std::make_unique<Mesh>(std::move(setup)), std::move(hosts),
                                                   std::move(topology), transport, std::move(selector)));
}

}  // namespace ringlet
