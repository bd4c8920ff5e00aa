// Marks the thread that runs what follows a call's completion: such code may let go of the group whose call it was, and
// a group cannot wait for the thread it is ended on. Thread safety: each thread sees its own marks.
#pragma once

namespace ringlet {

class Completing {
 public:
  explicit Completing(const void* whose) : whose_(whose), outer_(innermost_) { innermost_ = this; }
  ~Completing() { innermost_ = outer_; }
  Completing(const Completing&) = delete;
  Completing& operator=(const Completing&) = delete;

  /// Whether this thread is completing something of that owner's, however deep.
  static bool of(const void* whose) noexcept {
    for (const Completing* mark = innermost_; mark != nullptr; mark = mark->outer_) {
      if (mark->whose_ == whose) return true;
    }
    return false;
  }

 private:
  inline static thread_local const Completing* innermost_ = nullptr;
  const void* whose_;
  const Completing* outer_;
};

}  // namespace ringlet
