// How groups come together: what the ranks tell each other decides what they become, or why they do not.
#include "comm/group_init.h"

#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "comm/communicator.h"
#include "floats.h"
#include "schedule/topology.h"
#include "thread_store.h"

using namespace ringlet;

namespace {

// The built-in rules alone, whatever table this machine's user has.
[[maybe_unused]] const int no_table = ::setenv("RINGLET_TABLE", "", 1);

constexpr auto kSoon = std::chrono::seconds(60);

/// Ranks are threads here. So that they seem to be elsewhere, this store rewrites what a rank says of itself first.
class RewritingStore final : public Store {
 public:
  std::map<int, std::string> builds, hosts, users;  // by rank; a rank that is in none says what is so
  std::string elsewhere;                            // the end of the key of a region that is said to be on another host

  void set(const std::string& key, const std::string& value) override {
    std::string told = rewritten(key, value);
    if (!elsewhere.empty() && key.ends_with(elsewhere)) told.at(0) ^= 1;
    store_.set(key, told);
  }
  std::vector<std::string> get_all(const std::vector<std::string>& keys, const Deadline& deadline) override {
    return store_.get_all(keys, deadline);
  }
  bool has(const std::string& key) override { return store_.has(key); }
  int64_t add(const std::string& key, int64_t more) override { return store_.add(key, more); }
  void forget(const std::string& key) override { store_.forget(key); }
  size_t size() { return store_.size(); }

 private:
  std::string rewritten(const std::string& key, const std::string& value) const {
    const size_t found = key.find("/introduction/");
    if (found == key.npos || key.ends_with("/read")) return value;
    const int rank = std::stoi(key.substr(found + std::strlen("/introduction/")));
    std::string text;
    size_t begin = 0;
    for (const auto* said : {&builds, &hosts, &users}) {
      const size_t end = value.find('\0', begin);
      text += (said->contains(rank) ? said->at(rank) : value.substr(begin, end - begin)) + '\0';
      begin = end + 1;
    }
    return text += value.substr(begin);
  }

  ThreadStore store_;
};

/// What each rank's join() threw; "" where it made a group, with which `body` is called.
std::vector<std::string> join_all(Store& store, int world, Carrier carrier,
                                  const std::function<void(Communicator&)>& body) {
  static int made = 0;
  const std::string name = "ringlet/0123456789abcdef0123456789abcdef/team-" + std::to_string(++made) + "/[0, 1]";
  std::vector<std::string> errors(static_cast<size_t>(world));
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < world; ++rank) {
    ranks.emplace_back([&, rank] {
      try {
        Communicator group(join(store, name, {rank, world}, carrier, Deadline::after(kSoon)), kSoon);
        body(group);
        group.run({.collective = Collective::barrier});
      } catch (const Error& error) {
        errors[static_cast<size_t>(rank)] = std::string(ringlet::name(error.kind())) + ": " + error.what();
      }
    });
  }
  for (std::thread& rank : ranks) rank.join();
  return errors;
}

void add_up(Communicator& group) {
  Floats data(1000, static_cast<float>(group.rank() + 1));
  group.run(data.sum());
  CHECK_EQ(data.values[999], static_cast<float>(group.world() * (group.world() + 1)) / 2);
}

void all_make_a_group(RewritingStore& store, int world, Carrier carrier, const std::string& transport,
                      const std::vector<int>& hosts) {
  const auto errors = join_all(store, world, carrier, [&](Communicator& group) {
    CHECK_EQ(std::string(group.transport()), transport);
    CHECK(group.host_of_rank() == hosts);
    add_up(group);
  });
  for (const std::string& error : errors) CHECK_EQ(error, std::string());
}

TEST(hosts_decide_what_carries_the_bytes) {
  RewritingStore together;
  all_make_a_group(together, 3, Carrier::automatic, "shared_memory", {0, 0, 0});
  all_make_a_group(together, 2, Carrier::shared_memory, "shared_memory", {0, 0});
  all_make_a_group(together, 2, Carrier::tcp, "tcp", {0, 0});
  RewritingStore apart;
  apart.hosts = {{0, "a"}, {1, "b"}, {2, "a"}, {3, "b"}};
  all_make_a_group(apart, 4, Carrier::automatic, "shared_memory+tcp", {0, 1, 0, 1});
  all_make_a_group(apart, 2, Carrier::automatic, "shared_memory+tcp", {0, 1});
}

/// With it each rank counts as a host of its own where schedules are chosen, and still shares memory.
TEST(a_topology_can_be_ignored) {
  ::setenv("RINGLET_TOPOLOGY", "ignore", 1);
  RewritingStore apart;
  apart.hosts = {{0, "a"}, {1, "a"}, {2, "b"}, {3, "b"}};
  join_all(apart, 4, Carrier::automatic, [](Communicator& group) {
    CHECK(group.topology() != nullptr && group.topology()->hosts() == 4);
    add_up(group);
  });
  ::unsetenv("RINGLET_TOPOLOGY");
}

/// Rank 0 alone has said it, and every rank must learn it.
void what_is_wrong_is_told_to_all(const std::string& variable, const std::string& value, const std::string& said) {
  RewritingStore store;
  ::setenv(variable.c_str(), value.c_str(), 1);
  for (const Carrier carrier : {Carrier::automatic, Carrier::tcp}) {
    for (const std::string& error : join_all(store, 3, carrier, [](Communicator&) { CHECK(false); })) {
      CHECK(error.starts_with("InvalidUsage: "));
      CHECK_HAS(error, said);
    }
    CHECK_EQ(store.size(), 0u);
  }
  ::unsetenv(variable.c_str());
}

TEST(ranks_of_several_builds_make_no_group) {
  RewritingStore store;
  store.builds = {{2, "another"}};
  for (const Carrier carrier : {Carrier::automatic, Carrier::shared_memory, Carrier::tcp}) {
    for (const std::string& error : join_all(store, 3, carrier, [](Communicator&) { CHECK(false); })) {
      CHECK(error.starts_with("InvalidUsage: rank 2 runs another build of ringlet than rank 0"));
    }
    CHECK_EQ(store.size(), 0u);
  }
}

/// A build that has more of them is refused before; these are numbers of a rank whose memory is damaged.
TEST(numbers_that_mean_nothing_here_are_not_looked_up) {
  const CallSignature ours = call_signature({.collective = Collective::all_reduce, .count = 8});
  for (const uint64_t changed : {uint64_t{0xf}, uint64_t{0x1f} << 5, uint64_t{0xf} << 10, uint64_t{0x1ffff} << 14}) {
    CallSignature theirs = ours;
    theirs.signature |= changed;
    if (changed == uint64_t{0x1ffff} << 14) theirs.signature &= ~(uint64_t{1} << 31);  // below those of authored ones
    CHECK_HAS(describe(theirs, 3), "that this rank does not know");
  }
}

TEST(ranks_of_several_users_share_no_memory) {
  RewritingStore store;
  store.users = {{2, "12345"}};
  for (const std::string& error : join_all(store, 3, Carrier::automatic, [](Communicator&) { CHECK(false); })) {
    CHECK_HAS(error, "rank 2 runs as user 12345, rank 0 as user ");
  }
  all_make_a_group(store, 3, Carrier::tcp, "tcp", {0, 0, 0});
  store.hosts = {{2, "elsewhere"}};
  all_make_a_group(store, 3, Carrier::automatic, "shared_memory+tcp", {0, 0, 1});
}

TEST(a_rank_that_does_not_come_is_named) {
  const std::string said = "was not joined by rank(s) 1 in time";
  std::string told, other;
  for (const int limit_ms : {300, 3000, 30'000}) {  // the two that come must meet in it
    RewritingStore store;
    const auto two_of_three = [&](int rank) {
      const Deadline deadline = Deadline::after(std::chrono::milliseconds(limit_ms + 50 * rank));
      return CHECK_THROWS(Timeout, join(store, "g", {rank, 3}, Carrier::automatic, deadline));
    };
    std::thread second([&] { other = two_of_three(2); });
    told = two_of_three(0);
    second.join();
    if (told.find(said) != std::string::npos && other.find(said) != std::string::npos) break;
  }
  CHECK_HAS(told, said);
  CHECK_HAS(other, said);
}

/// Ranks of one host count from 0 among themselves, but their errors name the group's ranks.
TEST(errors_of_a_host_name_its_ranks) {
  RewritingStore store;
  store.hosts = {{0, "a"}, {1, "a"}, {2, "b"}, {3, "b"}};
  store.elsewhere = "/host/1/region/1";
  const auto fails = [&](int rank) {
    return CHECK_THROWS(
        Error, join(store, "h", {rank, 4}, Carrier::automatic, Deadline::after(std::chrono::milliseconds(1000))));
  };
  std::vector<std::thread> others;
  for (const int rank : {0, 1, 2}) others.emplace_back([&, rank] { fails(rank); });
  const std::string error = fails(3);
  for (std::thread& each : others) each.join();
  CHECK_HAS(error, "among ranks 2, 3, which share a host and count from 0 there: ");
}

TEST(carriers_have_names) {
  CHECK(parse_carrier("auto") == Carrier::automatic);
  CHECK(parse_carrier("tcp") == Carrier::tcp);
  CHECK_HAS(CHECK_THROWS(InvalidUsage, parse_carrier("udp")), "got \"udp\"");
  for (const char* each : {"auto", "shared_memory", "tcp"}) CHECK_EQ(std::string(name(parse_carrier(each))), each);
}

TEST(wrong_settings_are_told_to_all) {
  const auto folder = std::filesystem::temp_directory_path() / ("ringlet-join-" + std::to_string(::getpid()));
  std::filesystem::create_directories(folder);
  const std::string table = (folder / "table").string();
  std::ofstream(table) << "all_reduce ring\nall_reduce wring\n";
  what_is_wrong_is_told_to_all("RINGLET_TOPOLOGY", "ring", "RINGLET_TOPOLOGY=\"ring\" is not \"ignore\"");
  what_is_wrong_is_told_to_all("RINGLET_TABLE", table, table + ", line 2: all_reduce: algorithm must be one of");
  what_is_wrong_is_told_to_all("RINGLET_TABLE", table + "s", "RINGLET_TABLE names a table that cannot be read: ");
  ::setenv("RINGLET_TABLE", "", 1);
  std::filesystem::remove_all(folder);
}

}  // namespace
