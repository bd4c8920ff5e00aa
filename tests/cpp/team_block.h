// The GPU's pull kernel compiled for the host with a host thread for each of a block's: what host_block.h cannot show
// is where those threads must wait for each other. Under ThreadSanitizer a barrier that is missing is a data race.
#pragma once

#include <atomic>
#include <barrier>
#include <thread>
#include <vector>

#include "cuda/pull.h"
#include "host_block.h"

namespace team_block {

using namespace ringlet;

constexpr int kThreads = cuda::kMostTogether;  // each is a warp

/// What the threads of a block have in common.
struct Team {
  cuda::PullShared shared{};
  std::barrier<> barrier{kThreads};
  std::atomic<bool> any[2]{};
};

/// What cuda/pull.cu's DeviceBlock is on the device: one of these a thread.
class TeamBlock {
 public:
  static constexpr size_t kThreadsInOne = 1;  // of the host
  static constexpr unsigned kTurnsPerLook = 1;
  static constexpr size_t threads() { return kThreads; }

  TeamBlock(Team& team, int index, int thread) : team_(team), index_(index), thread_(thread) {}

  int index() const { return index_; }
  cuda::PullShared& shared() { return team_.shared; }
  void together() { team_.barrier.arrive_and_wait(); }
  template <class Act>
  void one(Act act) {
    if (thread_ == 0) act();
  }
  template <class Act>
  void each(Act act) {
    act(static_cast<size_t>(thread_), size_t{kThreads});
  }
  template <class Act>
  void lanes(int count, Act act) {
    if (thread_ < count) act(thread_, 0, 1);
  }
  static void warp() {}
  static bool all_lanes(bool mine) { return mine; }
  template <class Act>
  void split(int count, Act act) {
    const int team = kThreads / count, k = thread_ / team;
    if (k < count) act(k, static_cast<size_t>(thread_ % team), static_cast<size_t>(team));
  }
  bool any(bool mine) {
    std::atomic<bool>& flag = team_.any[turn_];
    turn_ = 1 - turn_;
    if (mine) flag = true;
    together();
    const bool answer = flag;
    team_.any[turn_] = false;  // of the turn after this one, which none has come to
    together();
    return answer;
  }

  static uint64_t load(const uint64_t* word) { return Words::load(word); }
  static uint64_t peek(const uint64_t* word) { return Words::peek(word); }
  static void fence() { Words::fence(); }
  static void store(uint64_t* word, uint64_t value) { Words::store(word, value); }
  static bool claim(uint64_t* word, uint64_t value) { return Words::claim(word, value); }
  static void put(uint64_t* word, uint64_t value) { Words::put(word, value); }
  static void put_packet(uint64_t* at, uint64_t low, uint64_t high) { Words::put_packet(at, low, high); }
  static void peek_packet(const uint64_t* at, uint64_t& low, uint64_t& high) { Words::peek_packet(at, low, high); }
  static uint64_t nanoseconds() { return Words::nanoseconds(); }
  static void pause() { Words::pause(); }
  template <class At>
  void publish(int count, At at, uint64_t value) {
    together();
    for (int k = thread_; k < count; k += kThreads) store(at(k), value);
  }

  template <class Waits>
  bool wait(int count, Waits waits, const cuda::PullWatch& watch) {
    bool bad = false;
    for (int k = thread_; k < count && !bad; k += kThreads)
      bad = !Words(0).wait(1, [&](int) { return waits(k); }, watch);
    return !any(bad);
  }

 private:
  using Words = host_block::HostBlock;  // words are the host's here as there

  Team& team_;
  const int index_, thread_;
  int turn_ = 0;
};

template <class Args, class Run>
void run_blocks(const Args& args, Run run) {
  std::vector<Team> teams(static_cast<size_t>(args.blocks));
  std::vector<std::thread> threads;
  for (int block = 0; block < args.blocks; ++block) {
    for (int thread = 0; thread < kThreads; ++thread) {
      threads.emplace_back([&args, &team = teams[static_cast<size_t>(block)], block, thread, run] {
        TeamBlock of_thread(team, block, thread);
        run(args, of_thread);
      });
    }
  }
  for (std::thread& thread : threads) thread.join();
}

template <class E, class Ops>
void pull(const cuda::PullArgs& given) {
  run_blocks(given,
             [](const auto& args, TeamBlock& block) { cuda::PullInterpreter<E, Ops, TeamBlock>(args, block).run(); });
}

inline void low_latency(const cuda::LowArgs& given) {
  run_blocks(given, [](const auto& args, TeamBlock& block) {
    cuda::LowInterpreter<cuda::Float32, cuda::Sums, TeamBlock>(args, block).run();
  });
}

inline void exchange(const cuda::ExchangeArgs& given) {
  run_blocks(given,
             [](const auto& args, TeamBlock& block) { cuda::ExchangeInterpreter<TeamBlock>(args, block).run(); });
}

}  // namespace team_block
