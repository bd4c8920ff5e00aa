// The backend's point-to-point messages, coalescing, and the barrier that names who is missing.
#include <algorithm>
#include <chrono>
#include <numeric>
#include <thread>

#include "base/error.h"
#include "base/interrupts.h"
#include "base/system_call.h"
#include "bindings/c10d_issue.h"
#include "bindings/lists.h"
#include "bindings/tensors.h"

namespace ringlet {

using c10d::OpType;

namespace {

constexpr std::chrono::milliseconds kLeastPause{1}, kMostPause{20};  // between two looks at who has come to a barrier

}  // namespace

/// An error within a batch is thrown at its end, and the rest of the batch does not start. If it left the batch at once,
/// torch would go on collecting calls.
C10dBackend::Handle C10dBackend::part(const std::function<Handle()>& start) {
  if (!collecting()) return start();
  try {
    if (!refused_) return start();
  } catch (...) {
    refused_ = std::current_exception();
  }
  const Title title{OpType::COALESCED, nullptr, group_->sequence()};
  auto handle = c10::make_intrusive<C10dWork>(getRank(), title, Tensors{}, Tensors{});
  handle->complete(refused_);
  return handle;
}

C10dBackend::Handle C10dBackend::message(Tensors& tensors, int peer, bool sending, int tag) {
  const char* call = sending ? "send" : "recv";
  const at::Tensor& tensor = only(tensors, call);
  check_tensor(tensor, call, "given");
  const bool any = peer == kAnySource;
  const Title title{sending ? OpType::SEND
                    : any   ? OpType::RECVANYSOURCE
                            : OpType::RECV,
                    sending ? "ringlet:send"
                    : any   ? "ringlet:recvAnySource"
                            : "ringlet:recv",
                    group_->sequence()};
  const Message message{peer, sending, dtype_of(tensor), static_cast<size_t>(tensor.numel()), data_of(tensor), {}, tag};
  if (!tensor.is_cpu()) {
    auto handle = c10::make_intrusive<C10dWork>(getRank(), title, tensors, tensors, tensor.device());
    std::vector<CoalescedMessage> alone;
    (collecting() ? coalesced_messages_ : alone).push_back({message, tensor, handle});
    exchange(alone);
    return remember(std::move(handle));
  }
  auto handle = c10::make_intrusive<C10dWork>(getRank(), title, tensors, tensors);
  C10dWork::follow(handle, group_->start(message, std::make_shared<MemoryHold>(std::initializer_list{&tensor})));
  return remember(std::move(handle));
}

/// The GPU messages of one batch move together: each alone would wait for its receiver or sender.
void C10dBackend::exchange(const std::vector<CoalescedMessage>& all) {
  if (all.empty()) return;
  DeviceCalls calls{.device = all[0].tensor.device(), .async = true};
  for (const CoalescedMessage& one : all) {
    calls.messages.push_back(one.message);
    calls.tensors.push_back(one.tensor);
  }
  calls.device = common_device(calls.tensors, "a batch of messages");
  const Enqueued enqueued = enqueue(*group_, calls);
  for (const CoalescedMessage& one : all) C10dWork::follow(one.handle, enqueued);
}

C10dBackend::Handle C10dBackend::send(Tensors& tensors, int peer, int tag) {
  return part([&] { return message(tensors, peer, true, tag); });
}

C10dBackend::Handle C10dBackend::recv(Tensors& tensors, int peer, int tag) {
  return part([&] {
    if (peer < 0) refuse_peer("recv", peer, getRank(), getSize());  // kAnySource is a call of its own
    return message(tensors, peer, false, tag);
  });
}

C10dBackend::Handle C10dBackend::recvAnysource(Tensors& tensors, int tag) {
  return part([&] { return message(tensors, kAnySource, false, tag); });
}

C10dBackend::Handle C10dBackend::remember(c10::intrusive_ptr<C10dWork> handle) {
  if (collecting()) coalescing_.push_back(handle);
  return handle;
}

/// A batch of this thread that is still open was left by an error that torch did not end it for.
void C10dBackend::startCoalescing() {
  drop_batch();
  std::thread::id nobody;
  if (!coalescer_.compare_exchange_strong(nobody, std::this_thread::get_id())) {
    throw InvalidUsage("startCoalescing: a batch is open already: call endCoalescing first");
  }
}

std::exception_ptr C10dBackend::drop_batch() {
  if (!collecting()) return nullptr;
  coalescing_.clear();
  coalesced_messages_.clear();
  coalescer_.store({});
  return std::exchange(refused_, nullptr);
}

C10dBackend::Handle C10dBackend::endCoalescing() {
  if (!collecting()) throw InvalidUsage("endCoalescing: no batch is open: call startCoalescing first");
  std::vector<c10::intrusive_ptr<C10dWork>> parts = std::exchange(coalescing_, {});
  const std::vector<CoalescedMessage> messages = std::exchange(coalesced_messages_, {});
  if (const std::exception_ptr refused = drop_batch()) std::rethrow_exception(refused);
  exchange(messages);
  Tensors results;
  for (const auto& part : parts) {
    const Tensors of_part = part->result();
    results.insert(results.end(), of_part.begin(), of_part.end());
  }
  // No profiling title: its calls have events of their own.
  const c10::Device device = common_device(results, "a batch of calls");
  auto all = c10::make_intrusive<C10dWork>(getRank(), Title{OpType::COALESCED, nullptr, group_->sequence()}, results,
                                           Tensors{}, device.is_cpu() ? std::nullopt : std::optional(device));
  C10dWork::follow(all, std::move(parts));
  return all;
}

void C10dBackend::monitoredBarrier(const c10d::BarrierOptions& options, bool wait_for_all) {
  const auto timeout = options.timeout.count() < 0 ? group_->timeout() : options.timeout;
  const Deadline deadline = Deadline::after(timeout);
  const auto place_of = [&](uint64_t barrier) { return name_ + "/monitored/" + std::to_string(barrier) + "/"; };
  const std::string place = place_of(++monitored_), before = place_of(monitored_ - 1);
  const std::string self = "Rank " + std::to_string(getRank());
  const std::string after = " after " + std::to_string(timeout.count()) + " ms";
  if (getRank() != 0) {
    store_.forget(before + std::to_string(getRank()));  // rank 0 reads it no more, or finds that this rank left
    store_.set(place + std::to_string(getRank()), "here");
    std::string verdict = "rank 0 said nothing" + after;
    try {
      verdict = store_.get(place + "verdict", deadline);
    } catch (const Timeout&) {  // told below, in the words of the barrier
      store_.set(place + std::to_string(getRank()), "left");
    }
    if (verdict == "passed") return;
    throw Timeout(self + " successfully reached monitoredBarrier, but received errors while waiting for send/recv " +
                  "from rank 0: " + verdict);
  }
  // Of all ranks in turn, for a rank that gives up says so when this rank is about to give up, too.
  std::vector<int> awaited(static_cast<size_t>(getSize()) - 1);
  std::iota(awaited.begin(), awaited.end(), 1);
  const auto here = [&](int q) {
    const std::string key = place + std::to_string(q);
    return store_.has(key) && store_.get(key, deadline) == "here";
  };
  std::chrono::microseconds pause = kLeastPause;
  for (bool over = false;; pause = std::min<std::chrono::microseconds>(2 * pause, kMostPause)) {
    std::erase_if(awaited, here);
    for (int q = 1; awaited.empty() && q < getSize(); ++q) {  // some may have given up since they were seen
      if (!here(q)) awaited.push_back(q);
    }
    if (awaited.empty() || over) break;
    check_interrupts();
    over = deadline.passed();
    if (!over) sleep_for(std::min<std::chrono::microseconds>(pause, deadline.left()));
  }
  const size_t absent = wait_for_all ? awaited.size() : std::min<size_t>(awaited.size(), 1);
  std::string missing;
  for (size_t i = 0; i < absent; ++i) missing += (i > 0 ? ", " : "") + std::to_string(awaited[i]);
  std::string verdict = "passed";
  if (absent > 0) {
    verdict = (absent > 1 ? "Ranks " : "Rank ") + missing + " failed to pass monitoredBarrier" + after;
    if (timeout.count() == 0) verdict = self + " timed out in monitoredBarrier" + after + ": " + verdict;
  }
  store_.set(place + "verdict", verdict);
  if (absent > 0) throw Timeout(verdict);
  store_.forget(before + "verdict");  // all ranks have come here, so they have read it
}

}  // namespace ringlet
