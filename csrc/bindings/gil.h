// Python's global lock: given up while the core works, and taken back.
//
// When Python ends (before 3.14), it ends a thread that asks for its lock at once, amid the C++ that the thread is in, and
// C++ then ends the process. So a thread that comes back when Python is about to end stays away until the process is
// gone. python_ends() waits for those that have asked before. A program's exit handler that joins a thread which stays
// away would wait for ever.
// Thread safety: any.
#pragma once

#include <Python.h>

namespace ringlet {

/// While one lives, Python waits for it before it ends. `granted`: it has not begun to end, or this thread ends it.
struct AskForGil {
  AskForGil();
  ~AskForGil();
  AskForGil(const AskForGil&) = delete;
  AskForGil& operator=(const AskForGil&) = delete;
  const bool granted;
};

/// What PyEval_SaveThread gave.
void take_gil_back(PyThreadState* state) noexcept;

class GilReleased {
 public:
  GilReleased() : state_(PyEval_SaveThread()) {}
  ~GilReleased() { take_gil_back(state_); }
  GilReleased(const GilReleased&) = delete;
  GilReleased& operator=(const GilReleased&) = delete;

 private:
  PyThreadState* const state_;
};

/// In a thread that may have it already.
class GilTaken {
 public:
  GilTaken();
  /// In one that has asked for it, and been granted it.
  explicit GilTaken(const AskForGil&) : state_(PyGILState_Ensure()) {}
  ~GilTaken() { PyGILState_Release(state_); }
  GilTaken(const GilTaken&) = delete;
  GilTaken& operator=(const GilTaken&) = delete;

 private:
  const PyGILState_STATE state_;
};

/// In what torch's own bindings call without the lock, which they take back behind it, as they do. Stays away where Python
/// has begun to end; it may still begin in the moment before torch asks.
struct ComesBackToTorch {
  ComesBackToTorch() = default;
  ~ComesBackToTorch();
  ComesBackToTorch(const ComesBackToTorch&) = delete;
  ComesBackToTorch& operator=(const ComesBackToTorch&) = delete;
};

/// By the thread that ends Python, which has the lock. From here on no other thread gets it.
void python_ends();

}  // namespace ringlet
