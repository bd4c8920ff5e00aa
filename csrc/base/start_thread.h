// Threads of this library. Thread safety: any.
#pragma once

#include <signal.h>

#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "base/error.h"

namespace ringlet {

/// While it lives, this thread takes no signals, and a thread that it starts takes none ever: the program's own threads
/// take them. All but those that a fault of the thread's own raises.
class SignalsBlocked {
 public:
  SignalsBlocked() noexcept {
    sigset_t all;
    ::sigfillset(&all);
    for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS, SIGABRT}) ::sigdelset(&all, fault);
    ::pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalsBlocked() { ::pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t before_;
};

/// Starts a thread, which takes no signals. If the system refuses, throws ResourceError that names the `purpose`.
template <typename Body>
std::thread start_thread(const char* purpose, Body&& body) {
  const SignalsBlocked blocked;
  try {
    return std::thread(std::forward<Body>(body));
  } catch (const std::system_error& error) {
    throw ResourceError(std::string("cannot start a thread for ") + purpose + ": " + error.code().message() +
                        "; raise the limit on threads (ulimit -u, or the container's limit on pids) or on memory");
  }
}

}  // namespace ringlet
