#include "bindings/c10d_work.h"

#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>

#include "base/error.h"
#include "base/interrupts.h"
#include "bindings/gil.h"
#include "comm/messenger.h"

namespace ringlet {

C10dWork::C10dWork(int rank, const Title& title, std::vector<at::Tensor> outputs,
                   const std::vector<at::Tensor>& profiled, std::optional<c10::Device> device)
    : c10d::Work(rank, title.type),
      profiled_(title.text != nullptr && profiling() ? std::make_unique<Profiled>(title.text, profiled) : nullptr),
      outputs_(std::move(outputs)),
      device_(device),
      sequence_(title.sequence),
      future_(c10::make_intrusive<c10::ivalue::Future>(
          c10::ListType::create(c10::TensorType::get()),
          device ? std::vector<c10::Device>{*device} : std::vector<c10::Device>{})) {}

void C10dWork::follow(const c10::intrusive_ptr<C10dWork>& self, std::shared_ptr<ringlet::Work> work) {
  self->work_ = std::move(work);
  self->work_->note_end([self](const std::exception_ptr& error) { self->complete(error); });
}

void C10dWork::follow(const c10::intrusive_ptr<C10dWork>& self, std::vector<c10::intrusive_ptr<C10dWork>> parts) {
  self->parts_ = std::move(parts);
  if (self->device_) {
    const c10::impl::VirtualGuardImpl guard(self->device_->type());
    const c10::StreamGuard on(guard.getStreamFromGlobalPool(*self->device_));
    for (const auto& part : self->parts_) part->future_->wait();
    self->complete(nullptr);
    return;
  }
  const auto left = std::make_shared<std::atomic<size_t>>(self->parts_.size() + 1);
  const auto one_less = [self, left] {
    if (left->fetch_sub(1, std::memory_order_acq_rel) > 1) return;
    std::exception_ptr error;
    for (const auto& part : self->parts_) {
      if (!error) error = part->exception();
    }
    self->complete(error);
  };
  for (const auto& part : self->parts_) {
    part->future_->addCallback([one_less](c10::ivalue::Future&) { one_less(); }, /*uses_future=*/false);
  }
  one_less();
}

void C10dWork::follow(const c10::intrusive_ptr<C10dWork>& self, const Enqueued& enqueued) {
  {
    const c10::StreamGuard on(enqueued.stream);  // the Future's value is ready when this stream is
    self->future_->markCompleted(c10::IValue(self->outputs_));
  }
  self->done_ = enqueued.done;
  self->work_ = enqueued.work;
  self->work_->then([self](std::exception_ptr error) { self->ended(error); });
}

void C10dWork::assist(const Deadline& deadline) {
  if (work_) work_->await(deadline);
  for (const auto& part : parts_) part->assist(deadline);
}

/// The Future's owner waits for it without this handle, and may run callbacks when it is ready.
void C10dWork::expect_outside_waiter() {
  if (work_) work_->expect_outside_waiter();
  for (const auto& part : parts_) part->expect_outside_waiter();
}

int C10dWork::sourceRank() const {
  const auto* request = dynamic_cast<const Messenger::Request*>(work_.get());
  if (request == nullptr) return c10d::Work::sourceRank();
  return request->peer();
}

void C10dWork::ended(std::exception_ptr error) {
  if (profiled_) profiled_->end();
  finish(error);
}

void C10dWork::complete(std::exception_ptr error) {
  ended(error);
  if (error) {
    future_->setError(error);
  } else {
    future_->markCompleted(c10::IValue(outputs_));
  }
}

/// The current stream waits. The host waits only for `timeout`, if one is given.
bool C10dWork::wait_on_device(std::chrono::milliseconds timeout) {
  for (const auto& part : parts_) part->wait_on_device(timeout);
  if (work_ && timeout != kNoTimeout) work_->wait(timeout);
  if (work_) work_->raise_if_failed();
  future_->wait();
  // The Future covers only results, and a rank may have none.
  if (done_) done_->block(c10::impl::VirtualGuardImpl(device_->type()).getStream(*device_));
  return true;
}

/// On a device this asks the core's work, as wait() does: it is done a moment before it completes this handle.
bool C10dWork::isCompleted() {
  if (work_) work_->test();
  const bool own = device_ && work_ ? work_->done() : c10d::Work::isCompleted();
  return own && std::all_of(parts_.begin(), parts_.end(), [](const auto& part) { return part->isCompleted(); });
}

bool C10dWork::wait(std::chrono::milliseconds timeout) {
  const ComesBackToTorch comes_back;
  if (device_) return wait_on_device(timeout);
  const Deadline deadline = Deadline::after(timeout == kNoTimeout ? std::chrono::milliseconds::max() : timeout);
  assist(deadline);
  std::unique_lock lock(mutex_);
  const auto complete = [this] { return completed_; };
  while (!cv_.wait_for(lock, std::min(deadline.left(), kInterruptCheckEvery), complete)) {
    lock.unlock();
    check_interrupts();
    lock.lock();
    if (!deadline.passed() || completed_) continue;
    throw Timeout(c10d::opTypeToString(opType_) + " #" + std::to_string(sequence_) + " on rank " +
                  std::to_string(rank_) + " is not complete after " + std::to_string(timeout.count()) +
                  " ms of waiting, and goes on: wait for it again");
  }
  if (exception_) std::rethrow_exception(exception_);
  return true;
}

}  // namespace ringlet
