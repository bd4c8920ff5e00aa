// Ranks of one group as threads of this process, each with its own Wires, and bytes that tell where they belong.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "check.h"
#include "transport/address.h"
#include "transport/shared_memory.h"
#include "transport/wires.h"

using Bytes = std::vector<std::byte>;
using Hosts = std::vector<int>;  // by rank

inline std::string hex(const ringlet::Token& token) {
  std::string text;
  for (const uint8_t byte : token) {
    text += "0123456789abcdef"[byte >> 4];
    text += "0123456789abcdef"[byte & 15];
  }
  return text;
}

/// What rank `from` sends to rank `to`: different everywhere.
inline Bytes pattern(size_t bytes, int from, int to) {
  Bytes data(bytes);
  uint64_t state = 1 + 1000 * static_cast<uint64_t>(from) + static_cast<uint64_t>(to);
  for (std::byte& each : data) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    each = static_cast<std::byte>(state >> 56);
  }
  return data;
}

/// The rendezvous of ranks that are threads.
class ThreadStore final : public ringlet::Store {
 public:
  void set(const std::string& key, const std::string& value) override {
    const std::lock_guard lock(mutex_);
    values_[key] = value;
    changed_.notify_all();
  }
  std::string get(const std::string& key, const ringlet::Deadline& deadline) {
    std::unique_lock lock(mutex_);
    if (!changed_.wait_for(lock, deadline.left(), [&] { return values_.count(key) != 0; })) {
      throw ringlet::Timeout("nobody set " + key);
    }
    return values_[key];
  }
  std::vector<std::string> get_all(const std::vector<std::string>& keys, const ringlet::Deadline& deadline) override {
    std::vector<std::string> values;
    for (const std::string& key : keys) values.push_back(get(key, deadline));
    return values;
  }
  bool has(const std::string& key) override {
    const std::lock_guard lock(mutex_);
    return values_.count(key) != 0;
  }
  int64_t add(const std::string& key, int64_t more) override {
    const std::lock_guard lock(mutex_);
    return numbers_[key] += more;
  }
  void forget(const std::string& key) override {
    const std::lock_guard lock(mutex_);
    values_.erase(key);
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, std::string> values_;
  std::map<std::string, int64_t> numbers_;
};

class Group {
 public:
  enum class Start { all, first_alone };
  /// What the others are told of where a rank can be reached.
  using CardChange = std::function<void(int rank, ringlet::Card& card)>;

  /// TCP between all.
  explicit Group(int world, const CardChange& change_card = {}, Start begin = Start::all)
      : key_(ringlet::random_token()), hosts_(world), ranks_(world) {
    for (int rank = 0; rank < world; ++rank) {
      ringlet::Card card = ringlet::Card::unpack(ringlet::Wires::card());
      if (change_card) change_card(rank, card);
      cards_.push_back(card.pack());
      hosts_[rank] = rank;
    }
    for (int rank = 0; rank < (begin == Start::all ? world : 1); ++rank) start(rank);
  }

  /// Shared memory where `hosts` are equal, TCP elsewhere.
  explicit Group(const Hosts& hosts)
      : key_(ringlet::random_token()),
        cards_(hosts.size(), ringlet::Wires::card()),
        hosts_(hosts),
        ranks_(hosts.size()) {
    ThreadStore store;
    std::vector<std::thread> threads;
    for (int rank = 0; rank < world(); ++rank) {
      threads.emplace_back([&, rank] {
        const int place = static_cast<int>(std::count(hosts.begin(), hosts.begin() + rank, hosts[rank]));
        const int together = static_cast<int>(std::count(hosts.begin(), hosts.end(), hosts[rank]));
        const std::string name = "host-" + std::to_string(hosts[rank]);
        const auto deadline = ringlet::Deadline::after(std::chrono::seconds(60));
        start(rank, ringlet::connect_with_bells(store, name, place, together, deadline));
      });
    }
    for (std::thread& thread : threads) thread.join();
  }

  void start(int rank, std::unique_ptr<ringlet::Transport> local = nullptr) {
    ranks_[rank] = std::make_unique<ringlet::Wires>(ringlet::Wires::Setup{
        .rank = rank, .world = world(), .key = key_, .cards = cards_, .hosts = hosts_, .local = std::move(local)});
  }

  int world() const { return static_cast<int>(hosts_.size()); }

  ringlet::Wires& rank(int rank) { return *ranks_[rank]; }
  const ringlet::Token& key() const { return key_; }

  /// What a rank throws is a failed check.
  void run(const std::function<void(ringlet::Wires&)>& body) {
    std::vector<std::thread> threads;
    for (auto& wires : ranks_) {
      threads.emplace_back([&] {
        try {
          body(*wires);
        } catch (const std::exception& error) {
          check_report(false, __FILE__, __LINE__, error.what());
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
  }

 private:
  ringlet::Token key_;
  std::vector<std::string> cards_;
  std::vector<int> hosts_;
  std::vector<std::unique_ptr<ringlet::Wires>> ranks_;
};

// So long that a missed wake-up stops the test.
inline constexpr int64_t kSleepNanoseconds = 600'000'000'000;

inline void about_to_sleep(ringlet::Wires& wires) {
  for (const ringlet::Lane lane : {ringlet::Lane::collectives, ringlet::Lane::outgoing, ringlet::Lane::incoming}) {
    wires.about_to_sleep(lane);
  }
}

template <typename Done>
void sleep_until(ringlet::Wires& wires, ringlet::Pipe& pipe, Done done, bool writing = false) {
  while (!done()) {
    about_to_sleep(wires);
    if (done()) return;
    const ringlet::Wires::Watch watch{&pipe, !writing, writing};
    wires.sleep(ringlet::Lane::collectives, {&watch, 1}, kSleepNanoseconds);
  }
}

inline ringlet::Pipe* wait_for(ringlet::Wires& wires, int peer, ringlet::Lane lane) {
  ringlet::Pipe* pipe = nullptr;
  while ((pipe = wires.open(peer, lane)) == nullptr) {
    // Where messages are waited for, the other pipe tells whether the peer is still there.
    const ringlet::Wires::Watch watch{wires.find(peer, ringlet::Lane::collectives), true, false};
    wires.sleep(lane, {&watch, watch.pipe == nullptr ? size_t{0} : size_t{1}}, kSleepNanoseconds);
  }
  return pipe;
}

inline void write_all(ringlet::Wires& wires, ringlet::Pipe& pipe, Bytes data) {
  size_t done = 0;
  const auto more = [&] {
    const iovec piece{data.data() + done, data.size() - done};
    done += pipe.write(&piece, 1);
    return done == data.size();
  };
  sleep_until(wires, pipe, more, true);
}

inline Bytes read_all(ringlet::Wires& wires, ringlet::Pipe& pipe, size_t bytes) {
  Bytes data(bytes);
  size_t done = 0;
  const auto more = [&] {
    const iovec piece{data.data() + done, data.size() - done};
    done += pipe.read(&piece, 1);
    return done == data.size();
  };
  sleep_until(wires, pipe, more);
  return data;
}

/// Bytes to and from one peer on one lane, in pieces of odd sizes; a message lane has one direction.
struct Exchange {
  Exchange(ringlet::Wires& wires, int peer, ringlet::Lane lane, size_t bytes) : peer(peer), lane(lane) {
    if (lane != ringlet::Lane::incoming) outgoing = pattern(bytes, wires.rank(), peer);
    if (lane != ringlet::Lane::outgoing) expected = pattern(bytes, peer, wires.rank());
    incoming.resize(expected.size());
  }

  bool done() const { return sent == outgoing.size() && received == expected.size(); }
  void advance(ringlet::Wires& wires) {
    if (pipe == nullptr) pipe = wires.open(peer, lane);
    if (pipe == nullptr) return;
    const size_t half = (outgoing.size() - sent) / 2;
    const iovec out[] = {{outgoing.data() + sent, half},
                         {outgoing.data() + sent + half, outgoing.size() - sent - half}};
    if (sent < outgoing.size()) sent += pipe->write(out, 2);
    const size_t third = (expected.size() - received) / 3;
    const iovec in[] = {{incoming.data() + received, third},
                        {incoming.data() + received + third, expected.size() - received - third}};
    if (received < expected.size()) received += pipe->read(in, 2);
    if (!done() && pipe->ended()) throw ringlet::PeerLost("the pipe ended: " + pipe->why_ended());
  }

  int peer;
  ringlet::Lane lane;
  Bytes outgoing{}, incoming{}, expected{};
  size_t sent = 0, received = 0;
  ringlet::Pipe* pipe = nullptr;
};

/// Runs all of them to their ends in one thread, asleep where nothing moves, and compares.
inline void exchange(ringlet::Wires& wires, std::vector<Exchange>& all) {
  for (;;) {
    about_to_sleep(wires);
    bool done = true;
    uint64_t before = wires.bytes_sent() + wires.bytes_received();
    std::vector<ringlet::Wires::Watch> watches;
    for (Exchange& each : all) {
      each.advance(wires);
      done = done && each.done();
      if (each.pipe != nullptr && !each.done()) watches.push_back({each.pipe, true, each.sent < each.outgoing.size()});
    }
    if (done) break;
    if (wires.bytes_sent() + wires.bytes_received() == before) {
      wires.sleep(ringlet::Lane::collectives, watches, kSleepNanoseconds);
    }
  }
  for (const Exchange& each : all) CHECK(each.incoming == each.expected);
}
