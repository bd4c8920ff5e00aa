// Runs a function on `world` threads as ranks of one group and gathers what they throw.
#pragma once

#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "comm/communicator.h"
#include "transport/threads.h"

inline std::vector<std::string> run_ranks(int world, bool share_addresses,
                                          const std::function<void(ringlet::Communicator&)>& body,
                                          std::chrono::milliseconds timeout = std::chrono::seconds(60)) {
  static int generation = 0;
  const std::string name = "test-" + std::to_string(++generation);
  std::vector<std::string> errors(world);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        ringlet::Communicator group(
            ringlet::join_threads(name, rank, world, ringlet::Deadline::after(std::chrono::seconds(60)),
                                  share_addresses),
            timeout);
        body(group);
      } catch (const ringlet::Error& error) {
        errors[rank] = std::string(ringlet::name(error.kind())) + ": " + error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return errors;
}
