// Threads of this library. Thread safety: any.
#pragma once

#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "base/error.h"

namespace ringlet {

/// Starts a thread. If the system refuses, throws SystemError that names the `purpose`.
template <typename Body>
std::thread start_thread(const char* purpose, Body&& body) {
  try {
    return std::thread(std::forward<Body>(body));
  } catch (const std::system_error& error) {
    throw SystemError(std::string("cannot start a thread for ") + purpose + ": " + error.code().message() +
                      "; raise the limit on threads (ulimit -u, or the container's limit on pids) or on memory");
  }
}

}  // namespace ringlet
