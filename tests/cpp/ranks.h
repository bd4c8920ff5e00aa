// Runs a function on `world` threads as ranks of one group and gathers what they throw.
#pragma once

#include <algorithm>
#include <exception>
#include <functional>
#include <latch>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "comm/communicator.h"
#include "engine/message/message_engine.h"
#include "engine/pull/pull_engine.h"
#include "floats.h"
#include "thread_store.h"
#include "transport/in_process.h"
#include "transport/shared_memory.h"

/// What lies between the ranks. `eights`: TCP everywhere, but every eight ranks count as a host; so twos and threes.
/// `mixed`: ranks are on two hosts in turn, with shared memory inside and TCP between them.
enum class Between { one_memory, kept_memory, stages, tcp, twos, threes, eights, mixed };

inline std::unique_ptr<ringlet::Engine> make_engine(const std::string& name, int rank, int world, Between between,
                                                    const ringlet::Token& key) {
  using namespace ringlet;
  if (between == Between::one_memory || between == Between::kept_memory || between == Between::stages) {
    const auto soon = Deadline::after(std::chrono::seconds(60));
    const TensorMemory tensors = between == Between::one_memory    ? TensorMemory::shared
                                 : between == Between::kept_memory ? TensorMemory::kept
                                                                   : TensorMemory::ordinary;
    return std::make_unique<PullEngine>(join_threads(name, rank, world, soon, tensors));
  }
  Mesh::Setup setup;
  setup.rank = rank;
  setup.world = world;
  setup.key = key;
  setup.addresses.assign(static_cast<size_t>(world), Mesh::address());
  for (int q = 0; q < world; ++q) setup.hosts.push_back(q);
  std::vector<int> hosts = setup.hosts;
  if (between != Between::tcp && between != Between::mixed) {
    const int on_a_host = between == Between::twos ? 2 : between == Between::threes ? 3 : 8;
    for (int& host : hosts) host /= on_a_host;
  }
  if (between == Between::mixed) {
    static ThreadStore store;
    for (int& host : hosts) host %= 2;
    const auto before = std::count(hosts.begin(), hosts.begin() + rank, hosts[rank]);
    const auto together = std::count(hosts.begin(), hosts.end(), hosts[rank]);
    setup.hosts = hosts;
    if (together > 1) {
      setup.local =
          connect_shared_memory(store, name + "/" + std::to_string(hosts[rank]), static_cast<int>(before),
                                static_cast<int>(together), Deadline::after(std::chrono::seconds(60)), Rings::all);
    }
  }
  Topology topology(hosts);
  return std::make_unique<MessageEngine>(std::make_unique<Mesh>(std::move(setup)), std::move(hosts),
                                         std::move(topology), "tcp");
}

inline std::vector<std::string> run_ranks(int world, Between between,
                                          const std::function<void(ringlet::Communicator&)>& body,
                                          std::chrono::milliseconds timeout = std::chrono::seconds(60)) {
  static int generation = 0;
  const std::string name = "test-" + std::to_string(++generation);
  const ringlet::Token key = ringlet::random_token();
  std::vector<std::string> errors(world);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        ringlet::Communicator group(make_engine(name, rank, world, between, key), timeout);
        body(group);
      } catch (const ringlet::Error& error) {
        errors[rank] = std::string(ringlet::name(error.kind())) + ": " + error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return errors;
}

inline void no_errors(const std::vector<std::string>& errors) {
  for (const std::string& error : errors) CHECK_EQ(error, std::string());
}

/// As run_ranks(); what a rank throws is a failed check.
inline void run_well(int world, Between between, const std::function<void(ringlet::Communicator&)>& body,
                     std::chrono::milliseconds timeout = std::chrono::seconds(60)) {
  no_errors(run_ranks(world, between, body, timeout));
}

/// As run_ranks(), with one rank that is stuck elsewhere until all others have found that out.
inline std::vector<std::string> run_ranks_but_one(int stuck, int world, Between between,
                                                  const std::function<void(ringlet::Communicator&)>& body) {
  std::latch others(world - 1);
  const auto rank_does = [&](ringlet::Communicator& group) {
    group.run({.collective = ringlet::Collective::barrier, .timeout = std::chrono::seconds(60)});
    if (group.rank() == stuck) return others.wait();
    try {
      body(group);
    } catch (...) {
      others.count_down();
      throw;
    }
    others.count_down();
  };
  return run_ranks(world, between, rank_does, std::chrono::seconds(2));
}
