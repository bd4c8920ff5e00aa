// Marks a thread while it runs the callbacks of a complete call, or waits for a call. A callback, or a signal handler
// in a wait, may drop the call's group, and a group cannot wait for the thread on which it ends. Thread safety: each
// thread sees its own marks.
#pragma once

namespace ringlet {

template <typename What>
class ThreadMark {
 public:
  explicit ThreadMark(const void* whose) : whose_(whose), outer_(innermost_) { innermost_ = this; }
  ~ThreadMark() { innermost_ = outer_; }
  ThreadMark(const ThreadMark&) = delete;
  ThreadMark& operator=(const ThreadMark&) = delete;

  /// Whether this thread is in something of this owner, at any depth.
  static bool of(const void* whose) noexcept {
    for (const ThreadMark* mark = innermost_; mark != nullptr; mark = mark->outer_) {
      if (mark->whose_ == whose) return true;
    }
    return false;
  }

 private:
  inline static thread_local const ThreadMark* innermost_ = nullptr;
  const void* whose_;
  const ThreadMark* outer_;
};

using Completing = ThreadMark<struct CompletingMark>;  ///< runs callbacks
using Waits = ThreadMark<struct WaitsMark>;            ///< waits for a call

}  // namespace ringlet
