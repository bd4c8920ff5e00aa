// Algorithms that are added at run time, and the rules that name them: what is refused, and that they run as built-in
// ones do, while other threads add more.
#include "engine/authored.h"

#include <atomic>
#include <cstring>
#include <random>
#include <thread>

#include "contract.h"
#include "schedule/algorithms.h"

using namespace ringlet;
using namespace contract;

namespace {

/// The schedules of a built-in algorithm, as if somebody had written them.
std::vector<Schedule> schedules_of(const Algorithm& algorithm, int world, int root = 0) {
  std::vector<Schedule> ranks;
  for (int rank = 0; rank < world; ++rank) ranks.push_back(schedule_of(algorithm, {rank, world, root}));
  return ranks;
}

const Algorithm& built_in(Collective collective, const char* name) { return *find_algorithm(collective, name); }

TEST(names_lead_to_the_newest) {
  const Algorithm& first = add_algorithm(Collective::all_reduce, "mine", "the first");
  CHECK(find_authored(Collective::all_reduce, "mine") == &first);
  CHECK(find_authored(Collective::broadcast, "mine") == nullptr);
  const Algorithm& second = add_algorithm(Collective::all_reduce, "mine", "the second");
  const Algorithm& other = add_algorithm(Collective::broadcast, "mine", "of another collective");
  CHECK(find_any_algorithm(Collective::all_reduce, "mine") == &second);
  CHECK(find_any_algorithm(Collective::all_reduce, "ring") == &built_in(Collective::all_reduce, "ring"));
  CHECK(newest_authored() == &other);
  CHECK(first.authored->id == second.authored->id);
  CHECK(authored_by_id(Collective::all_reduce, first.authored->id) == &second);
  CHECK(authored_by_id(Collective::broadcast, other.authored->id) == &other);
  CHECK(authored_at(index_of(first)) == &first && authored_at(index_of(second)) == &second);
  CHECK(authored_at(index_of(other) + 1) == nullptr && authored_by_id(Collective::all_reduce, 0) == nullptr);
  CHECK((authored_algorithms() == std::vector<const Algorithm*>{&second, &other}));
  CHECK(all_algorithm_names(Collective::broadcast).ends_with(", mine"));
  CHECK_HAS(CHECK_THROWS(InvalidUsage, add_algorithm(Collective::all_reduce, "ring", "")),
            "all_reduce has a built-in algorithm \"ring\"");
}

/// Names whose numbers are equal could not be told apart in the ranks' agreement.
TEST(names_of_the_same_hash_are_refused) {
  std::string refused;
  for (int i = 0; refused.empty() && i < 5'000; ++i) {
    try {
      add_algorithm(Collective::gather, "g" + std::to_string(i), "");
    } catch (const InvalidUsage& error) {
      refused = error.what();
    }
  }
  CHECK_HAS(refused, "have the same hash: rename one of them");
}

TEST(what_the_engines_cannot_take_is_refused) {
  const Algorithm& algorithm = add_algorithm(Collective::all_reduce, "too large", "");
  Schedule wide(kMostAuthoredParts + 1), long_one(1);
  long_one.rounds.resize(static_cast<size_t>(kMostAuthoredRounds) + 1);
  for (const Schedule& schedule : {wide, long_one}) {
    CHECK_HAS(CHECK_THROWS(InvalidUsage, hand_over(algorithm, {2, 0, {}}, {Schedule(1), schedule})),
              "all_reduce algorithm \"too large\" has ", "at most 32768 rounds and 16384 parts");
  }
  CHECK_HAS(CHECK_THROWS(InvalidUsage, schedule_of(algorithm, {0, 2})), "has no schedule for a world of 2 here");
}

/// What was handed over for a place stays what it was.
TEST(a_place_keeps_its_schedules) {
  const Algorithm& algorithm = add_algorithm(Collective::broadcast, "placed", "");
  const Algorithm &tree = built_in(Collective::broadcast, "tree"), &star = built_in(Collective::broadcast, "star");
  hand_over(algorithm, {4, 1, {}}, schedules_of(tree, 4, 1));
  hand_over(algorithm, {4, 1, {0, 0, 0, 0}}, schedules_of(star, 4, 1));
  hand_over(algorithm, {4, 1, {0, 0, 1, 1}}, schedules_of(star, 4, 1));
  const Topology two_hosts(std::vector<int>{0, 0, 1, 1});
  const auto rounds = [](const Schedule& schedule) { return schedule.rounds.size(); };
  CHECK_EQ(rounds(schedule_of(algorithm, {1, 4, 1})), rounds(schedule_of(tree, {1, 4, 1})));
  CHECK_EQ(rounds(schedule_of(algorithm, {1, 4, 1, &two_hosts})), rounds(schedule_of(star, {1, 4, 1})));
  CHECK_HAS(CHECK_THROWS(InvalidUsage, schedule_of(algorithm, {1, 4, 2})), "no schedule");
}

/// Meanwhile another thread adds algorithms, and each rank hands over what all have.
TEST_EACH(they_run_like_built_in_ones, Between between, Between::one_memory, Between::stages, Between::tcp) {
  std::atomic<bool> ended{false};
  std::thread adds([&] {
    for (int i = 0; !ended.load() && i < 1000; ++i) {
      const Algorithm& more = add_algorithm(Collective::scatter, "more", "");
      hand_over(more, {3, 0, {}}, schedules_of(built_in(Collective::scatter, "linear"), 3));
      CHECK(authored_at(index_of(more)) == &more);
      std::this_thread::yield();
    }
  });
  for (const auto& [collective, likeness] :
       {std::pair{Collective::all_reduce, "ring"}, std::pair{Collective::reduce_scatter, "circulant"},
        std::pair{Collective::broadcast, "tree"}}) {
    const Algorithm& algorithm = add_algorithm(collective, "written", "as somebody would");
    for (const int world : {2, 3, 5}) {
      run_well(world, between, [&](Communicator& group) {
        std::vector<int> apart;
        for (int rank = 0; rank < world && between == Between::tcp; ++rank) apart.push_back(rank);
        hand_over(algorithm, {world, 0, apart}, schedules_of(built_in(collective, likeness), world));
        CHECK(!group.has_agreed_on(algorithm, 0));
        group.note_agreed(algorithm, 0);
        CHECK(group.has_agreed_on(algorithm, 0) && !group.has_agreed_on(algorithm, 1));
        for (const size_t count : {size_t{1}, size_t{30}, size_t{100'000}}) {
          try_call(group, {.collective = collective, .algorithm = &algorithm, .count = count}, true, count > 1,
                   group.rank() % 2 == 0);
        }
      });
    }
  }
  ended = true;
  adds.join();
}

// ---- rules that name them, and others

TEST(rules_may_name_them) {
  const Algorithm& algorithm = add_algorithm(Collective::all_reduce, "ruled", "");
  const Selector selector("all_reduce up to 1KiB world 2- staged ruled\nall_reduce gpus above 1MiB nccl\n", "t");
  Situation situation{Collective::all_reduce, 1024, 3, false};
  CHECK(&selector.choose(situation) == &algorithm);
  CHECK_EQ(selector.rule_for(situation).source, std::string("t: all_reduce up to 1KiB world 2- staged ruled"));
  situation.in_place = true;
  CHECK(&selector.choose(situation) != &algorithm);
  CHECK(selector.names_authored() && !Selector().names_authored());
  CHECK((selector.authored(Collective::all_reduce, 2, nullptr) == std::vector<const Algorithm*>{&algorithm}));
  CHECK(selector.authored(Collective::all_reduce, 1, nullptr).empty());
  CHECK(selector.authored(Collective::broadcast, 2, nullptr).empty());
  const std::vector<int> hosts{0, 1, 1};
  const Topology topology(hosts);
  CHECK(selector.authored(Collective::all_reduce, 3, &topology).empty());
  CHECK(selector.way_for(Collective::all_reduce, size_t{2} << 20, 4) == Way::nccl);
  CHECK(!selector.way_for(Collective::all_reduce, 100, 4));
  CHECK(named_algorithm(Collective::all_reduce, "ruled") == &algorithm);
  CHECK(named_algorithm(Collective::all_reduce, "auto") == nullptr);
  CHECK_HAS(CHECK_THROWS(InvalidUsage, named_algorithm(Collective::all_reduce, "none")), "ruled");
}

/// Whatever the bytes, a table is either taken or refused by line.
TEST(any_text_is_taken_or_refused) {
  static constexpr const char* kWords[] = {
      "all_reduce", "broadcast", "all_to_all", "tuned",  "ring",      "tree",    "nccl",        "peers",
      "gpus",       "up",        "to",         "above",  "world",     "2-4",     "5-",          "-",
      "4KiB",       "0B",        "9GiB",       "staged", "hosts",     "network", "#",           "\n",
      "\r\n",       "\t",        "4",          "-1",     "processor", "A-1",     "small_bytes", "staged_segment_bytes",
      "\xff"};
  std::mt19937 random(7);
  int taken = 0, refused = 0;
  for (int i = 0; i < 20'000; ++i) {
    std::string text;
    for (auto words = random() % 9; words > 0; --words) {
      text += kWords[random() % std::size(kWords)];
      text += random() % 20 == 0 ? static_cast<char>(random()) : ' ';
    }
    try {
      for (const Rule& rule : parse_table(text, "t", "A-1").rules) {
        CHECK(rule.least_bytes <= rule.most_bytes && rule.least_world <= rule.most_world);
        rule.fits({Collective::all_reduce, 4096, 4, true});
      }
      ++taken;
    } catch (const InvalidUsage& error) {
      CHECK(std::strncmp(error.what(), "t, line ", 8) == 0);
      ++refused;
    }
  }
  CHECK(taken > 100 && refused > 1000);
}

}  // namespace
