#include "comm/communicator.h"

#include <sched.h>

#include <algorithm>
#include <exception>
#include <string_view>

#include "base/interrupts.h"
#include "base/process.h"
#include "base/start_thread.h"
#include "base/system_call.h"
#include "comm/reentrancy.h"
#include "engine/call_check.h"
#include "gpu/gpu_group.h"

namespace ringlet {
namespace {

// A callback of a complete call may start a call on another thread while the caller's thread starts one: they take
// turns. A thread that holds the group for longer is in a call of its own.
constexpr auto kTurn = std::chrono::milliseconds(50);
// Calls from this size on are worth a thread of their own, if a processor is free.
constexpr size_t kLargeBytes = size_t{64} << 10;
constexpr int64_t kMostCtas = 1024;                                 // more processors than a GPU has
const auto kForAsLongAsItTakes = std::chrono::milliseconds::max();  // the call has a timeout of its own

/// Marks the group as in use by one thread. A second thread gets an error, and cannot corrupt the first one's call.
class InUse {
 public:
  InUse(std::atomic<bool>& busy, const std::atomic<bool>& closed) : busy_(busy) {
    if (!busy_.exchange(true, std::memory_order_acquire)) [[likely]]
      return;
    const OutsideRuntime outside;  // who holds the group may wait for the runtime
    const Deadline deadline = Deadline::after(kTurn);
    while (busy_.exchange(true, std::memory_order_acquire)) {
      if (closed) refuse_closed("a call");
      if (deadline.passed() && checking_interrupts()) {
        throw InvalidUsage(
            "a call in a signal handler that interrupts a call of the group: note the signal in the handler, and make "
            "the call after that one");
      }
      if (deadline.passed()) {
        throw InvalidUsage(
            "two threads call one group at the same time: give each thread a group of its own, or pass async_op=True");
      }
      ::sched_yield();
    }
  }
  ~InUse() { busy_.store(false, std::memory_order_release); }
  InUse(const InUse&) = delete;

 private:
  std::atomic<bool>& busy_;
};

/// Whether ranks compare the lengths of the blocks first.
bool is_several_calls(const Call& call) { return call.collective == Collective::all_to_all && call.blocks != nullptr; }

void tell(const Message& message, const LogSource& source, const char* what) {
  const std::string peer = message.peer == kAnySource ? "any rank" : "rank " + std::to_string(message.peer);
  const std::string tag = message.tag == 0 ? "" : ", tag " + std::to_string(message.tag);
  log(LogLevel::debug, source,
      (message.sending ? "send to " : "recv from ") + peer + " (" + name(message.dtype) + ", " +
          std::to_string(message.count) + " elements" + tag + ") " + what);
}

}  // namespace

void check_max_ctas(int64_t most) {
  if (most >= 0 && most <= kMostCtas) return;
  throw InvalidUsage("max_ctas must be from 1 to " + std::to_string(kMostCtas) + ", or 0 for no limit, got " +
                     std::to_string(most));
}

Communicator::Communicator(std::unique_ptr<Engine> engine, std::chrono::milliseconds timeout)
    : engine_(std::move(engine)),
      rank_(engine_->rank()),
      world_(engine_->world()),
      ranks_are_threads_(std::string_view(engine_->transport()) == "threads"),
      owner_(this_process()),
      timeout_(timeout),
      collectives_(std::make_shared<CallQueue>(*engine_)),
      messenger_(std::make_shared<Messenger>(engine_->p2p())) {}

Communicator::~Communicator() {
  const Uninterrupted whole;  // nobody would get the exception
  close(std::chrono::milliseconds(1000));
  if (owner_ != this_process()) leak();
}

/// For a forked child: it lacks the threads of these objects and so cannot end them, and peers see its parent's state.
void Communicator::leak() noexcept {
  new std::shared_ptr<CallQueue>(std::move(collectives_));
  new std::shared_ptr<Messenger>(std::move(messenger_));
  new std::map<int, std::shared_ptr<GpuGroup>>(std::move(gpus_));
  static_cast<void>(engine_.release());
}

void Communicator::check_process() const {
  if (owner_ == this_process()) [[likely]]
    return;
  throw InvalidUsage("this group belongs to process " + std::to_string(owner_) + "; a forked child (here: process " +
                     std::to_string(this_process()) +
                     ") cannot use it: call ringlet.finalize() and make a new group there");
}

void Communicator::check(const Call& call) const {
  check_call(call, rank_, world_);
  // All ranks have been given these lengths. Those of an all-to-all they must compare before they can refuse alike.
  const bool known = call.blocks != nullptr && !is_several_calls(call);
  if (known && call.blocks->uneven) refuse_moved_blocks(call, call.blocks->longest);
}

void Communicator::prepare(Call& call) {
  health().raise_if_failed();
  if (closed_) refuse_closed(name(call.collective));
  check(call);
  if (call.timeout.count() <= 0) call.timeout = timeout_;
  call.sequence = sequence_++;
}

/// Whether a call may run on the caller's thread: no call is before it, and this is not a callback of another call.
bool Communicator::at_once() const { return !collectives_->pending() && !collectives_->has_turn(); }

void Communicator::run(Call call) {
  check_process();
  {
    const InUse in_use(busy_, closed_);
    if (at_once()) {
      prepare(call);
      run_now(call, false);
      return;
    }
  }
  const OutsideRuntime outside;  // pending calls may need the runtime to release their tensors
  await_own(*start(call, nullptr), [&] { return std::string(name(call.collective)); });
}

std::shared_ptr<Work> Communicator::start(Call call, std::shared_ptr<void> keep) {
  return give([&]() -> CallQueue::Job {
    prepare(call);
    CallQueue::Job job{.call = call, .large = buffer_bytes(call, world_) > kLargeBytes};
    if (is_several_calls(call)) job.whole = [this, call] { run_now(call, true); };
    job.title = [signature = call_signature(call), sequence = call.sequence] { return describe(signature, sequence); };
    job.keep = std::move(keep);
    return job;
  });
}

void Communicator::run(const Job& job) {
  check_process();
  {
    const InUse in_use(busy_, closed_);
    if (at_once()) {
      run_now(job, number(), false);
      return;
    }
  }
  const OutsideRuntime outside;
  await_own(*start(job, nullptr), [] { return std::string("a call"); });
}

/// Waits for a call whose tensors belong to the caller afterwards. An interrupt poisons the group, and is thrown once
/// nothing moves in the tensors any more.
void Communicator::await_own(Work& work, const std::function<std::string()>& what) {
  try {
    work.await(Deadline::after(kForAsLongAsItTakes));
  } catch (const Interrupted&) {
    health().poison_in_flight(what);
    const Uninterrupted rest;
    work.await(Deadline::after(kForAsLongAsItTakes));
    throw;
  }
  work.raise_if_failed();
}

std::shared_ptr<Work> Communicator::start(Job job, std::shared_ptr<void> keep) {
  const auto prepared = [&]() -> CallQueue::Job {
    auto run = [this, job = std::move(job), sequence = number()] { run_now(job, sequence, true); };
    return {.call = {}, .whole = std::move(run), .keep = std::move(keep)};
  };
  return give(prepared);
}

std::shared_ptr<Work> Communicator::start(std::vector<Call> calls, std::shared_ptr<void> keep) {
  const auto prepared = [&]() -> CallQueue::Job {
    const uint64_t sequence = number();
    size_t bytes = 0;
    bool piecewise = true;
    for (Call& call : calls) {
      check(call);
      if (call.timeout.count() <= 0) call.timeout = timeout_;
      call.sequence = sequence;
      bytes += buffer_bytes(call, world_);
      piecewise = piecewise && !is_several_calls(call);
    }
    const bool large = bytes > kLargeBytes;
    if (piecewise) {
      const Call first = calls.front();
      calls.erase(calls.begin());
      return {.call = first, .later = std::move(calls), .keep = std::move(keep), .large = large};
    }
    auto run = [this, calls = std::move(calls)] {
      for (const Call& call : calls) run_now(call, true);
    };
    return {.call = {}, .whole = std::move(run), .keep = std::move(keep), .large = large};
  };
  return give(prepared);
}

/// Puts a call into the queue. What runs when a call is complete gives one that runs at once, not in this group's turn,
/// so that the caller's thread can give more meanwhile; it counts as pending from then on, so that none runs beside it.
template <typename Prepare>
std::shared_ptr<Work> Communicator::give(const Prepare& prepared) {
  check_process();
  CallQueue::Job job;
  std::shared_ptr<Work> work;
  bool ahead = false;
  or_fail([&] {
    const InUse in_use(busy_, closed_);
    collectives_->make_ready();  // before the call has its number, which the other ranks count too
    job = prepared();
    ahead = collectives_->may_run_ahead();
    work = ahead ? collectives_->reserve(std::move(job.title)) : collectives_->submit(std::move(job));
  });
  if (ahead) {
    const auto whole = [&] {
      if (job.whole) return job.whole();
      run_now(job.call, true);
      for (const Call& call : job.later) run_now(call, true);
    };
    collectives_->run_reserved(*work, whole, std::move(job.keep));
  } else {
    collectives_->progress(/*given=*/true);
  }
  return work;
}

/// The sequence number of the next call.
uint64_t Communicator::number() {
  health().raise_if_failed();
  if (closed_) refuse_closed("a call");
  return sequence_++;
}

/// An error that is not this library's, such as bad_alloc, or torch's in a copy, is this rank's alone: its peers may be
/// in the call. So it fails the group.
template <typename Act>
void Communicator::or_fail(const Act& act) {
  try {
    act();
  } catch (const Error&) {
    throw;
  } catch (const Interrupted&) {
    throw;
  } catch (...) {
    health().poison_in_flight([] { return "a call"; });
    throw;
  }
}

void Communicator::run_now(const Job& job, uint64_t sequence, bool background) {
  or_fail([&] {
    job([&](Call call) {
      check(call);
      if (call.timeout.count() <= 0) call.timeout = timeout_;
      call.sequence = sequence;
      run_now(call, background);
    });
  });
}

void Communicator::run_now(const Call& call, bool background) {
  if (is_several_calls(call)) {
    or_fail([&] {
      Blocks agreed = *call.blocks;
      agree_on_blocks(call, agreed, background);
      Call even = call;
      even.blocks = &agreed;
      even.count = agreed.longest;
      engine_->run(even, background);
    });
  } else {
    engine_->run(call, background);
  }
}

void Communicator::check(const Message& message) const {
  const bool any = !message.sending && message.peer == kAnySource;
  if (!any && (message.peer < 0 || message.peer >= world_ || message.peer == rank_)) {
    refuse_peer(message.sending ? "send" : "recv", message.peer, rank_, world_);
  }
}

void Communicator::prepare(Message& message) {
  check_process();
  health().raise_if_failed();
  if (closed_) refuse_closed(message.sending ? "send" : "recv");
  check(message);
  if (message.timeout.count() <= 0) message.timeout = timeout_;
}

void Communicator::run(Message message) {
  prepare(message);
  const bool told = logging(LogLevel::debug);
  std::shared_ptr<Work> request;
  or_fail([&] {
    if (told) tell(message, engine_->calls().source(), "begins");
    request = messenger_->post(message, nullptr, true);
  });
  await_own(*request, [&] { return describe(message); });
  if (told) tell(message, engine_->calls().source(), "done");
}

std::shared_ptr<Messenger::Request> Communicator::start(Message message, std::shared_ptr<void> keep) {
  prepare(message);
  const bool told = logging(LogLevel::debug);
  std::shared_ptr<Messenger::Request> request;
  or_fail([&] {
    if (told) tell(message, engine_->calls().source(), "is posted");
    request = messenger_->post(message, std::move(keep), false);
    if (told) {
      request->then([source = engine_->calls().source(), message](const std::exception_ptr& error) {
        tell(message, source, error ? "failed" : "done");
      });
    }
  });
  return request;
}

namespace {

uint64_t agreed_key(const Algorithm& algorithm, int root) {
  return static_cast<uint64_t>(index_of(algorithm)) << 32 | static_cast<uint32_t>(root);
}

}  // namespace

bool Communicator::has_agreed_on(const Algorithm& algorithm, int root) const {
  if (last_agreed_.load(std::memory_order_relaxed) == agreed_key(algorithm, root)) return true;
  const std::lock_guard lock(agreed_mutex_);
  if (!agreed_.contains({index_of(algorithm), root})) return false;
  last_agreed_.store(agreed_key(algorithm, root), std::memory_order_relaxed);
  return true;
}

void Communicator::note_agreed(const Algorithm& algorithm, int root) {
  const std::lock_guard lock(agreed_mutex_);
  agreed_.insert({index_of(algorithm), root});
  last_agreed_.store(agreed_key(algorithm, root), std::memory_order_relaxed);
}

std::shared_ptr<GpuGroup> Communicator::on_gpu(int device) {
  check_process();
  health().raise_if_failed();
  if (closed_) refuse_closed("a call");
  {
    const std::lock_guard lock(gpus_mutex_);
    if (const auto found = gpus_.find(device); found != gpus_.end()) return found->second;
  }
  std::shared_ptr<GpuGroup> made;
  try {
    GpuExecutors::Parts parts = GpuExecutors::find(device);
    parts.max_ctas = max_ctas_;
    made = std::make_shared<GpuGroup>(*this, parts);  // with all other ranks
  } catch (const Interrupted&) {
    health().poison_in_flight([] { return "its first call on a GPU"; });
    throw;
  }
  if (logging(LogLevel::info)) {
    log(LogLevel::info, engine_->calls().source(), "GPU " + std::to_string(device) + ": " + made->describe());
  }
  {
    const std::lock_guard lock(gpus_mutex_);
    if (!closed_) return gpus_[device] = std::move(made);
  }
  made->end();  // close() has ended those that it found
  refuse_closed("a call");
}

void Communicator::abort(const std::string& reason) {
  check_process();
  health().abort(reason);
  std::map<int, std::shared_ptr<GpuGroup>> gpus;
  {
    const std::lock_guard lock(gpus_mutex_);
    gpus = gpus_;
  }
  std::exception_ptr failed;
  for (auto& [device, gpu] : gpus) {
    try {
      gpu->abort(reason);
    } catch (const Error&) {  // such as no thread; the other GPUs' calls end
      failed = std::current_exception();
    }
  }
  if (failed) std::rethrow_exception(failed);
}

bool Communicator::completing() const {
  const std::lock_guard lock(gpus_mutex_);
  const bool on_gpu =
      std::any_of(gpus_.begin(), gpus_.end(), [](const auto& gpu) { return gpu.second->is_this_thread(); });
  return on_gpu || collectives_->has_turn() || Completing::of(messenger_.get());
}

/// Whether this thread is in a signal handler that interrupts a call of the group.
bool Communicator::in_signal_handler() const {
  return checking_interrupts() && (busy_ || Waits::of(messenger_.get()) || Waits::of(collectives_.get()));
}

void Communicator::dispose(Communicator* group) noexcept {
  if (group->owner_ != this_process()) return;  // a thread of the parent may have held its locks
  if (!group->completing() && !group->in_signal_handler()) {
    delete group;
  } else {
    try {
      start_thread("the end of a group", [group] { delete group; }).detach();
    } catch (const Error&) {  // the group stays in memory: no caller is left who could get the error
    }
  }
}

void Communicator::close(std::chrono::milliseconds patience) {
  if (closed_) return;
  if (owner_ != this_process()) {
    closed_ = true;
    return;
  }
  if (completing()) {
    throw InvalidUsage("rank " + std::to_string(rank_) + " of " + std::to_string(world_) +
                       ": close() in a callback of one of the group's calls: close the group in another thread");
  }
  if (in_signal_handler()) {
    throw InvalidUsage(
        "rank " + std::to_string(rank_) + " of " + std::to_string(world_) +
        ": close() in a signal handler that interrupts a call of the group: raise an exception in the handler, and "
        "close the group where the program catches it");
  }
  if (closed_.exchange(true)) return;
  std::map<int, std::shared_ptr<GpuGroup>> gpus;
  {
    const std::lock_guard lock(gpus_mutex_);
    gpus.swap(gpus_);
  }
  for (auto& [device, gpu] : gpus) gpu->end();  // outside the lock, because they wait for pending calls
  gpus.clear();
  std::exception_ptr interrupted;            // ends the waiting, but the group still ends
  const auto wait = [&](const auto& done) {  // whether done(most), which waits for at most that long, came true in time
    const Deadline deadline = Deadline::after(patience);
    while (!done(std::min(deadline.left(), kInterruptCheckEvery))) {
      if (deadline.passed() || interrupted) return false;
      if ((interrupted = caught_interrupt())) patience = std::chrono::milliseconds(0);
    }
    return true;
  };
  const bool turn = wait([&](auto most) { return await_turn(most); });  // another thread may be in a call
  bool quiet = wait([&](auto most) { return collectives_->wait_idle(most); }) && turn;
  quiet = wait([&](auto most) { return messenger_->wait_idle(most); }) && quiet;
  if (!quiet)
    health().abort(in_words([&] { return health().self() + " closed the group while this call was pending"; }));
  if (!turn) await_turn(kForAsLongAsItTakes);
  collectives_->end();
  messenger_->end();
  engine_->leave(quiet, patience);
  tell_end();
  if (interrupted) std::rethrow_exception(interrupted);
}

void Communicator::tell_made(double seconds) const {
  if (!logging(LogLevel::info)) return;
  std::map<int, std::string> ranks;  // by host
  for (int q = 0; q < world_; ++q) {
    std::string& of_host = ranks[host_of_rank()[q]];
    if (!of_host.empty()) of_host += ',';
    of_host += std::to_string(q);
  }
  std::string text = "group made in " + in_time_units(seconds) + ": " + transport() + ", ";
  text += ranks.size() == 1 ? "one host" : std::to_string(ranks.size()) + " hosts:";
  for (const auto& [host, of_host] : ranks) {
    if (ranks.size() > 1) text += " ranks " + of_host + (host + 1 < static_cast<int>(ranks.size()) ? " |" : "");
  }
  const std::string& table = selector().origin();
  text += "; rules: " + (table.empty() ? "the built-in ones" : table + ", then the built-in ones");
  log(LogLevel::info, engine_->calls().source(), text + "; timeout " + in_seconds(timeout_.load()));
}

void Communicator::tell_end() const try {
  if (!logging(LogLevel::info)) return;
  const CallLog& calls = engine_->calls();
  std::string text = "group closed: " + std::to_string(calls.made()) + " calls, " + in_binary_units(bytes_received()) +
                     " received, " + in_binary_units(bytes_sent()) + " sent, " + in_time_units(calls.waited_seconds()) +
                     " asleep in waits";
  if (const auto kind = engine_->health().failure()) text += "; it had failed: " + std::string(ringlet::name(*kind));
  log(LogLevel::info, calls.source(), text);
} catch (const std::bad_alloc&) {  // nothing is told
}

/// Takes the group's turn for good; false if another thread held it all the time.
bool Communicator::await_turn(std::chrono::milliseconds most) {
  const Deadline deadline = Deadline::after(most);
  while (busy_.exchange(true, std::memory_order_acquire)) {
    if (deadline.passed()) return false;
    sleep_for(std::chrono::microseconds(100));
  }
  return true;
}

}  // namespace ringlet
