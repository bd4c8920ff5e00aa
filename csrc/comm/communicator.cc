#include "comm/communicator.h"

#include <algorithm>
#include <string_view>

#include "comm/progress.h"

namespace ringlet {
namespace {

/// Marks the group as in use by one thread; a second one is told instead of corrupting the first one's call.
class InUse {
 public:
  explicit InUse(std::atomic<bool>& busy) : busy_(busy) {
    if (busy_.exchange(true, std::memory_order_acquire)) {
      throw InvalidUsage(
          "two threads call one group at the same time; give each thread a group of its own, or use async_op");
    }
  }
  ~InUse() { busy_.store(false, std::memory_order_release); }
  InUse(const InUse&) = delete;

 private:
  std::atomic<bool>& busy_;
};

bool overlap(const std::byte* a, size_t a_bytes, const std::byte* b, size_t b_bytes) {
  return a < b + b_bytes && b < a + a_bytes;
}

std::unique_ptr<ProgressThread>& made(std::unique_ptr<ProgressThread>& thread) {
  if (!thread) thread = std::make_unique<ProgressThread>();
  return thread;
}

bool pending(const std::unique_ptr<ProgressThread>& thread) { return thread && thread->pending(); }

}  // namespace

Communicator::Communicator(std::unique_ptr<Transport> transport, std::chrono::milliseconds timeout)
    : transport_(std::move(transport)),
      rank_(transport_->rank()),
      world_(transport_->world()),
      ranks_are_threads_(std::string_view(transport_->name()) == "threads"),
      timeout_(timeout),
      waiter_(*transport_),
      engine_(*transport_, waiter_) {}

Communicator::~Communicator() { close(std::chrono::milliseconds(1000)); }

void Communicator::prepare(Call& call) {
  waiter_.raise_if_failed();
  if (closed_) throw InvalidUsage(std::string(name(call.collective)) + " on a group that was closed");
  if (is_reduction(call.collective) && !supports(call.dtype, call.op)) {
    throw InvalidUsage(std::string(name(call.collective)) + ": " + name(call.op) + " is not defined for " +
                       name(call.dtype));
  }
  if (call.root < 0 || call.root >= world_) {
    throw InvalidUsage(std::string(name(call.collective)) + ": root " + std::to_string(call.root) +
                       " is not a rank of a group of " + std::to_string(world_));
  }
  if (call.collective == Collective::all_to_all && call.count > 0) {
    const size_t bytes = call.count * element_size(call.dtype) * static_cast<size_t>(world_);
    if (overlap(call.input, bytes, call.output, bytes)) {
      throw InvalidUsage("all_to_all: output and input overlap; blocks would be overwritten before they are sent");
    }
  }
  if (call.timeout.count() <= 0) call.timeout = timeout_;
  call.sequence = sequence_++;
}

void Communicator::run(Call call) {
  const InUse in_use(busy_);
  prepare(call);
  if (pending(collectives_)) {
    const OutsideRuntime outside;  // pending calls may need the runtime to let their tensors go
    collectives_->submit([this, call] { run_now(call, true); }, nullptr)->wait(std::chrono::hours(24 * 365));
    return;
  }
  run_now(call, false);
}

std::shared_ptr<Work> Communicator::start(Call call, std::shared_ptr<void> keep) {
  const InUse in_use(busy_);
  prepare(call);
  return made(collectives_)->submit([this, call] { run_now(call, true); }, std::move(keep));
}

void Communicator::run_now(const Call& call, bool patient) {
  if (world_ == 1) {
    run_alone(call);
  } else {
    engine_.run(call, patient);
  }
}

/// A world of one: at most a copy, scaled where the operation says so.
void Communicator::run_alone(const Call& call) const {
  const size_t bytes = call.count * element_size(call.dtype);
  if (bytes == 0 || call.output == nullptr) return;
  if (is_reduction(call.collective) && call.op == ReduceOp::premul_sum) {
    ReduceArgs args{};
    args.dst = call.output;
    args.srcs = &call.input;
    args.n = 1;
    args.count = call.count;
    args.scaled_source = 0;
    args.scale = call.scale;
    args.divisor = 1;
    reduce_kernel(call.dtype, call.op)(args);
  } else if (call.input != call.output) {
    copy_bytes(call.output, call.input, bytes, false);
  }
}

void Communicator::prepare(Message& message) {
  waiter_.raise_if_failed();
  if (closed_) throw InvalidUsage("send or recv on a group that was closed");
  if (message.peer < 0 || message.peer >= world_ || message.peer == rank_) {
    throw InvalidUsage(std::string(message.sending ? "send to" : "recv from") + " rank " +
                       std::to_string(message.peer) + ": rank " + std::to_string(rank_) + " of " +
                       std::to_string(world_) + " has no such peer");
  }
  if (message.timeout.count() <= 0) message.timeout = timeout_;
}

void Communicator::run(Message message) {
  prepare(message);
  auto& thread = message.sending ? sends_ : receives_;
  if (pending(thread)) {
    const OutsideRuntime outside;
    start(message, nullptr)->wait(std::chrono::hours(24 * 365));
    return;
  }
  Transfer(*transport_, waiter_, message).finish(false);
}

std::shared_ptr<Work> Communicator::start(Message message, std::shared_ptr<void> keep) {
  prepare(message);
  return made(message.sending ? sends_ : receives_)
      ->submit([this, message] { Transfer(*transport_, waiter_, message).finish(true); }, std::move(keep));
}

void Communicator::abort(const std::string& reason) {
  waiter_.abort(reason);
  transport_->control().presence.store(static_cast<uint32_t>(Presence::left), std::memory_order_release);
}

/// Whether every message this rank sent has left its region.
bool Communicator::messages_taken() const {
  for (int q = 0; q < world_; ++q) {
    if (transport_->channel(q).sent.load() != transport_->channel_of(q, rank_).received.load()) return false;
  }
  return true;
}

void Communicator::close(std::chrono::milliseconds patience) {
  if (closed_) return;
  closed_ = true;
  bool quiet = true;
  for (auto* thread : {&collectives_, &sends_, &receives_}) {
    if (*thread && !(*thread)->wait_idle(patience)) quiet = false;
  }
  if (!quiet) waiter_.abort("rank " + std::to_string(rank_) + " closed the group while this call was pending");
  collectives_.reset();
  sends_.reset();
  receives_.reset();
  // Peers that are still reading this rank's stages need them a moment longer; if they take too long, the stages stay.
  if (quiet && messages_taken() && engine_.quiesce(patience)) transport_->retire();
  transport_->control().presence.store(static_cast<uint32_t>(Presence::left), std::memory_order_release);
}

}  // namespace ringlet
