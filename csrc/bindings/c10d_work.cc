#include "bindings/c10d_work.h"

#include "base/error.h"

namespace ringlet {

C10dWork::C10dWork(int rank, const Title& title, std::vector<at::Tensor> outputs,
                   const std::vector<at::Tensor>& profiled)
    : c10d::Work(rank, title.type, title.text, profiled),
      outputs_(std::move(outputs)),
      sequence_(title.sequence),
      future_(c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()))) {}

void C10dWork::follow(const c10::intrusive_ptr<C10dWork>& self, ringlet::Work& work, std::function<void()> deliver) {
  work.then([self, deliver = std::move(deliver)](std::exception_ptr error) {
    if (!error && deliver) {
      try {
        deliver();
      } catch (...) {
        error = std::current_exception();
      }
    }
    self->complete(error);
  });
}

void C10dWork::complete(std::exception_ptr error) {
  finish(error);
  if (error) {
    future_->setError(error);
  } else {
    future_->markCompleted(c10::IValue(outputs_));
  }
}

bool C10dWork::wait(std::chrono::milliseconds timeout) {
  std::unique_lock lock(mutex_);
  const auto complete = [this] { return completed_; };
  if (timeout == kNoTimeout) {
    cv_.wait(lock, complete);
  } else if (!cv_.wait_for(lock, timeout, complete)) {
    throw Timeout(c10d::opTypeToString(opType_) + " #" + std::to_string(sequence_) + " on rank " +
                  std::to_string(rank_) + " is not complete after " + std::to_string(timeout.count()) +
                  " ms of waiting; it goes on");
  }
  if (exception_) std::rethrow_exception(exception_);
  return true;
}

}  // namespace ringlet
