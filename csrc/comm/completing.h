// Marks a thread while it runs the callbacks of a complete call. A callback may drop the call's group, and a group
// cannot wait for the thread on which it ends. Thread safety: each thread sees its own marks.
#pragma once

namespace ringlet {

class Completing {
 public:
  explicit Completing(const void* whose) : whose_(whose), outer_(innermost_) { innermost_ = this; }
  ~Completing() { innermost_ = outer_; }
  Completing(const Completing&) = delete;
  Completing& operator=(const Completing&) = delete;

  /// Whether this thread runs callbacks of this owner, at any depth.
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
