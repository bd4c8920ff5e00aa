// Ranks of one group as threads of this process, each with its own Mesh, and bytes that tell where they belong.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "check.h"
#include "thread_store.h"
#include "transport/address.h"
#include "transport/mesh.h"
#include "transport/shared_memory.h"

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

class Group {
 public:
  enum class Start { all, first_alone };
  /// What the others are told of where a rank can be reached.
  using AddressChange = std::function<void(int rank, ringlet::PeerAddress& address)>;

  /// TCP between all.
  explicit Group(int world, const AddressChange& change_address = {}, Start begin = Start::all)
      : key_(ringlet::random_token()), hosts_(world), ranks_(world) {
    for (int rank = 0; rank < world; ++rank) {
      ringlet::PeerAddress address = ringlet::PeerAddress::unpack(ringlet::Mesh::address());
      if (change_address) change_address(rank, address);
      addresses_.push_back(address.pack());
      hosts_[rank] = rank;
    }
    for (int rank = 0; rank < (begin == Start::all ? world : 1); ++rank) start(rank);
  }

  /// Shared memory where `hosts` are equal, TCP elsewhere.
  explicit Group(const Hosts& hosts)
      : key_(ringlet::random_token()),
        addresses_(hosts.size(), ringlet::Mesh::address()),
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
        start(rank, ringlet::connect_shared_memory(store, name, place, together, deadline, ringlet::Rings::all));
      });
    }
    for (std::thread& thread : threads) thread.join();
  }

  void start(int rank, std::shared_ptr<ringlet::Transport> local = nullptr) {
    ranks_[rank] = std::make_unique<ringlet::Mesh>(ringlet::Mesh::Setup{.rank = rank,
                                                                        .world = world(),
                                                                        .key = key_,
                                                                        .addresses = addresses_,
                                                                        .hosts = hosts_,
                                                                        .local = std::move(local)});
  }

  int world() const { return static_cast<int>(hosts_.size()); }

  ringlet::Mesh& rank(int rank) { return *ranks_[rank]; }
  const ringlet::Token& key() const { return key_; }

  /// What a rank throws is a failed check.
  void run(const std::function<void(ringlet::Mesh&)>& body) {
    std::vector<std::thread> threads;
    for (auto& mesh : ranks_) {
      threads.emplace_back([&] {
        try {
          body(*mesh);
        } catch (const std::exception& error) {
          check_report(false, __FILE__, __LINE__, error.what());
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
  }

 private:
  ringlet::Token key_;
  std::vector<std::string> addresses_;
  std::vector<int> hosts_;
  std::vector<std::unique_ptr<ringlet::Mesh>> ranks_;
};

// So long that a missed wake-up stops the test.
inline constexpr int64_t kSleepNanoseconds = 600'000'000'000;

inline void about_to_sleep(ringlet::Mesh& mesh) {
  for (const ringlet::ConnectionKind which : ringlet::kConnectionKinds) mesh.about_to_sleep(which);
}

template <typename Done>
void sleep_until(ringlet::Mesh& mesh, ringlet::Pipe& pipe, Done done, bool writing = false) {
  while (!done()) {
    about_to_sleep(mesh);
    if (done()) return;
    const ringlet::Mesh::Watch watch{&pipe, !writing, writing};
    mesh.sleep(ringlet::ConnectionKind::collectives, {&watch, 1}, kSleepNanoseconds);
  }
}

inline ringlet::Pipe* wait_for(ringlet::Mesh& mesh, int peer, ringlet::ConnectionKind which) {
  ringlet::Pipe* pipe = nullptr;
  while ((pipe = mesh.open(peer, which)) == nullptr) {
    // Where messages are waited for, the other pipe tells whether the peer is still there.
    const ringlet::Mesh::Watch watch{mesh.find(peer, ringlet::ConnectionKind::collectives), true, false};
    mesh.sleep(which, {&watch, watch.pipe == nullptr ? size_t{0} : size_t{1}}, kSleepNanoseconds);
  }
  return pipe;
}

inline void write_all(ringlet::Mesh& mesh, ringlet::Pipe& pipe, Bytes data) {
  size_t done = 0;
  const auto more = [&] {
    const iovec piece{data.data() + done, data.size() - done};
    done += pipe.write(&piece, 1);
    return done == data.size();
  };
  sleep_until(mesh, pipe, more, true);
}

inline Bytes read_all(ringlet::Mesh& mesh, ringlet::Pipe& pipe, size_t bytes) {
  Bytes data(bytes);
  size_t done = 0;
  const auto more = [&] {
    const iovec piece{data.data() + done, data.size() - done};
    done += pipe.read(&piece, 1);
    return done == data.size();
  };
  sleep_until(mesh, pipe, more);
  return data;
}

/// Bytes to and from one peer on one kind, in pieces of odd sizes.
struct Exchange {
  Exchange(ringlet::Mesh& mesh, int peer, ringlet::ConnectionKind which, size_t bytes)
      : peer(peer),
        which(which),
        outgoing(pattern(bytes, mesh.rank(), peer)),
        incoming(bytes),
        expected(pattern(bytes, peer, mesh.rank())) {}

  bool done() const { return sent == outgoing.size() && received == expected.size(); }
  void advance(ringlet::Mesh& mesh) {
    if (pipe == nullptr) pipe = mesh.open(peer, which);
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
  ringlet::ConnectionKind which;
  Bytes outgoing, incoming, expected;
  size_t sent = 0, received = 0;
  ringlet::Pipe* pipe = nullptr;
};

/// Runs all of them to their ends in one thread, asleep where nothing moves, and compares.
inline void exchange(ringlet::Mesh& mesh, std::vector<Exchange>& all) {
  for (;;) {
    about_to_sleep(mesh);
    bool done = true;
    size_t moved = 0;
    std::vector<ringlet::Mesh::Watch> watches;
    for (Exchange& each : all) {
      const size_t before = each.sent + each.received;
      each.advance(mesh);
      moved += each.sent + each.received - before;
      done = done && each.done();
      if (each.pipe != nullptr && !each.done()) watches.push_back({each.pipe, true, each.sent < each.outgoing.size()});
    }
    if (done) break;
    if (moved == 0) mesh.sleep(ringlet::ConnectionKind::collectives, watches, kSleepNanoseconds);
  }
  for (const Exchange& each : all) CHECK(each.incoming == each.expected);
}
