#include "bindings/gil.h"

#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <thread>

namespace ringlet {
namespace {

std::atomic<bool> ending{false};
std::atomic<int> asking{0};
thread_local bool ends_python = false;
thread_local int asking_here = 0;  // of `asking`, this thread's

[[maybe_unused]] const bool forgotten_in_children = [] {  // there the other threads that asked do not exist
  ::pthread_atfork(nullptr, nullptr, [] { asking = asking_here; });
  return true;
}();

[[noreturn]] void stay_away() {
  while (true) ::pause();
}

PyGILState_STATE ensure() {
  const AskForGil ask;
  if (!ask.granted) stay_away();
  return PyGILState_Ensure();
}

}  // namespace

AskForGil::AskForGil() : granted((asking.fetch_add(1), !ending.load() || ends_python)) {
  if (granted) {
    ++asking_here;
  } else {
    asking.fetch_sub(1);
  }
}

AskForGil::~AskForGil() {
  if (!granted) return;
  --asking_here;
  asking.fetch_sub(1);
}

void take_gil_back(PyThreadState* state) noexcept {
  const AskForGil ask;
  if (!ask.granted) stay_away();
  PyEval_RestoreThread(state);
}

GilTaken::GilTaken() : state_(ensure()) {}

ComesBackToTorch::~ComesBackToTorch() {
  if (ending.load() && !ends_python && PyGILState_GetThisThreadState() != nullptr) stay_away();
}

void python_ends() {
  ends_python = ending = true;
  const GilReleased unlocked;
  while (asking.load() > 0) std::this_thread::yield();
}

}  // namespace ringlet
