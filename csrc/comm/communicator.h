// A group as its user holds it: checks calls, chooses algorithms, keeps their order, runs them now or later.
//
// Contract: calls are checked before anything moves. Synchronous calls run in the caller's thread; asynchronous ones
// in issue order, on whichever thread is there (comm/call_queue.h); a synchronous call behind pending ones waits for
// them.
// Point-to-point messages go their own way (comm/messenger.h). Tensors belong to the caller and must
// live until the call is complete (`keep` holds them for asynchronous calls). The first error poisons the group.
// Thread safety: one thread makes calls (InvalidUsage otherwise), and what runs when a call is complete; the rest any.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>

#include "comm/call_queue.h"
#include "comm/messenger.h"
#include "comm/work.h"
#include "engine/call.h"
#include "engine/engine.h"

namespace ringlet {

class GpuGroup;

class Communicator {
 public:
  Communicator(std::unique_ptr<Engine> engine, std::chrono::milliseconds timeout);
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  int rank() const { return rank_; }
  int world() const { return world_; }
  const char* transport() const { return engine_->transport(); }
  bool ranks_are_threads() const { return ranks_are_threads_; }
  uint64_t sequence() const { return sequence_; }
  std::chrono::milliseconds timeout() const { return timeout_; }
  void set_timeout(std::chrono::milliseconds timeout) { timeout_ = timeout; }

  /// The error that poisoned the group, if one did.
  std::optional<ErrorKind> failure() const { return engine_->failure(); }
  /// Throws it.
  void raise_if_failed() { engine_->raise_if_failed(); }
  /// Throws that, or what a peer has told of an error or of its end: for what waits beside the engine.
  void poll_failures() {
    engine_->raise_if_failed();
    engine_->poll_failures();
  }
  /// Poisons the group and tells the peers, for what went wrong beside the engine.
  void poison(const Error& error) noexcept;

  /// Throws InvalidUsage for a call that cannot be right on this rank, whatever the others call.
  void check(const Call& call) const;
  void check(const Message& message) const;

  /// call.timeout zero: the group's. Throws what wait.h lists.
  void run(Call call);
  std::shared_ptr<Work> start(Call call, std::shared_ptr<void> keep);

  /// Several calls under one sequence number, with work between them: `job` makes them by what it is handed.
  using Job = std::function<void(const std::function<void(Call)>& run)>;
  void run(const Job& job);
  std::shared_ptr<Work> start(Job job, std::shared_ptr<void> keep);
  /// The same for calls that run one after the other.
  std::shared_ptr<Work> start(std::vector<Call> calls, std::shared_ptr<void> keep);

  void run(Message message);
  std::shared_ptr<Messenger::Request> start(Message message, std::shared_ptr<void> keep);

  /// The group's part for tensors on that GPU of this rank, made by all ranks together when each first asks for its
  /// own. DeviceError on all of them where one lacks something; asked again they look again.
  GpuGroup& on_gpu(int device);

  /// Whether peers can read [pointer, pointer + bytes) in place.
  bool registered(const void* pointer, size_t bytes) const { return engine_->registered(pointer, bytes); }

  /// What `auto` means (engine.h).
  const Algorithm& algorithm_for(Collective collective, size_t bytes, bool registered) const {
    return engine_->algorithm_for(collective, bytes, registered);
  }

  /// Whether all ranks have agreed on an added algorithm's schedules for that root, and that they now have: whoever makes
  /// the first call with it sees to that.
  bool agreed(const Algorithm& algorithm, int root) const;
  void note_agreed(const Algorithm& algorithm, int root);

  const CallLog& calls() const { return engine_->calls(); }
  /// Tells that the group is made, and of what (base/log.h). `seconds`: how long that took.
  void tell_made(double seconds) const;

  /// What the engine goes by (engine.h).
  const Selector& selector() const { return engine_->selector(); }
  const Topology* topology() const { return engine_->topology(); }

  /// Which host each rank is on, numbered by first appearance.
  const std::vector<int>& hosts() const { return engine_->hosts(); }

  /// What collectives gave to peers, ever (where they read it themselves: 0), and TCP connections that stand.
  uint64_t bytes_sent() const { return engine_->bytes_sent(); }
  int connections() const { return engine_->connections(); }
  /// What collectives took in from peers, ever. From any thread.
  uint64_t bytes_received() const { return engine_->bytes_received(); }

  /// Ends pending and later calls of this rank with an error; peers see that it left.
  void abort(const std::string& reason);
  /// Leaves the group: pending calls are completed or, after `patience`, ended. Called by the destructor too.
  /// InvalidUsage from what runs when one of its calls is complete, or in a signal handler that interrupts one. An
  /// interrupt (base/runtime.h) ends the patience; it is thrown when the group has been left.
  void close(std::chrono::milliseconds patience);

  /// Ends a group on whatever thread lets go of it: on a thread that completes a call of its, by another one, later.
  static void dispose(Communicator* group) noexcept;

 private:
  void check_process() const;
  void leak() noexcept;
  std::shared_ptr<Work> give(const std::function<CallQueue::Job()>& prepared);
  bool at_once() const;
  bool await_turn(std::chrono::milliseconds most);
  void await_own(Work& work, const std::function<std::string()>& what);
  bool completing() const;
  uint64_t number();
  void prepare(Call& call);
  void prepare(Message& message);
  bool advance(const Call& call, bool spin);
  bool in_one_go(const Call& call) const;
  void run_now(const Call& call, bool background);
  void run_now(const Job& job, uint64_t sequence, bool background);
  void agree_on_blocks(const Call& call, Blocks& blocks, bool background);
  void carry_out(const Call& call, bool background);
  void run_alone(const Call& call) const;
  void tell_end() const;

  std::unique_ptr<Engine> engine_;
  const int rank_;
  const int world_;
  const bool ranks_are_threads_;
  const int owner_;  // the process that made it: a forked child's copy must leave its threads and its peers alone
  std::atomic<std::chrono::milliseconds> timeout_;
  std::atomic<uint64_t> sequence_{0};
  std::atomic<bool> busy_{false};
  std::atomic<bool> closed_{false};
  std::shared_ptr<CallQueue> collectives_;  // always there
  std::shared_ptr<Messenger> messenger_;
  mutable std::mutex agreed_mutex_;
  std::set<std::pair<int, int>> agreed_;                     // (index_of, root); guarded by agreed_mutex_
  mutable std::atomic<uint64_t> last_agreed_{~uint64_t{0}};  // one of them, for a look without a lock
  mutable std::mutex gpus_mutex_;
  std::map<int, std::unique_ptr<GpuGroup>> gpus_;  // by the rank's own number of the device; guarded by gpus_mutex_
};

}  // namespace ringlet
