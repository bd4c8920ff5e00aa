// A group, as one rank uses it: checks calls, chooses algorithms, keeps the calls' order, runs them now or later.
//
// Contract: calls are checked before anything moves. Synchronous calls run in the caller's thread. Asynchronous calls
// run in issue order, on any thread that is there (comm/call_queue.h). A synchronous call waits for the pending calls
// before it. Point-to-point messages have a queue of their own (comm/messenger.h). Tensors belong to the caller and
// must live until the call is complete (`keep` holds them for asynchronous calls). The first error poisons the group.
// Thread safety: one thread makes calls (InvalidUsage otherwise), and so may callbacks of complete calls. All other
// functions may be called from any thread.
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
#include "engine/call.h"
#include "engine/engine.h"
#include "engine/work.h"
#include "gpu/host_group.h"

namespace ringlet {

class GpuGroup;

/// Throws InvalidUsage for what is no number of processors.
void check_max_ctas(int64_t most);

class Communicator final : public HostGroup {
 public:
  Communicator(std::unique_ptr<Engine> engine, std::chrono::milliseconds timeout);
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  int rank() const override { return rank_; }
  int world() const override { return world_; }
  const char* transport() const { return engine_->transport(); }
  /// Whether calls in the background take no processor from this rank's computation.
  bool overlaps() const { return engine_->overlaps(); }
  bool ranks_are_threads() const { return ranks_are_threads_; }
  uint64_t sequence() const { return sequence_; }
  std::chrono::milliseconds timeout() const override { return timeout_; }
  void set_timeout(std::chrono::milliseconds timeout) { timeout_ = timeout; }

  Health& health() override { return engine_->health(); }
  const Health& health() const { return engine_->health(); }

  /// Throws InvalidUsage for a call that cannot be right on this rank, whatever the others call.
  void check(const Call& call) const override;
  void check(const Message& message) const override;

  /// call.timeout zero: the group's. Throws what engine.h lists.
  void run(Call call) override;
  std::shared_ptr<Work> start(Call call, std::shared_ptr<void> keep);

  /// Several calls under one sequence number, with work between them. `job` makes them through its argument.
  using Job = std::function<void(const std::function<void(Call)>& run)>;
  void run(const Job& job);
  std::shared_ptr<Work> start(Job job, std::shared_ptr<void> keep);
  /// The same for calls that run one after the other.
  std::shared_ptr<Work> start(std::vector<Call> calls, std::shared_ptr<void> keep);

  void run(Message message);
  std::shared_ptr<Messenger::Request> start(Message message, std::shared_ptr<void> keep);

  /// The group's part for tensors on this GPU. All ranks make it together, when each first asks for its own. Throws
  /// DeviceError on all ranks if one lacks something; a later call looks again.
  std::shared_ptr<GpuGroup> on_gpu(int device);

  /// How many of a GPU's processors the group's kernels take at most, and NCCL's for it; 0: no limit. The same on all
  /// ranks, and given before the first call on a GPU.
  int max_ctas() const { return max_ctas_; }
  void set_max_ctas(int64_t most) {
    check_max_ctas(most);
    max_ctas_ = static_cast<int>(most);
  }

  /// Whether peers can read [pointer, pointer + bytes) in place.
  bool registered(const void* pointer, size_t bytes) const { return engine_->registered(pointer, bytes); }

  /// What `auto` means (engine.h).
  const Algorithm& algorithm_for(Collective collective, size_t bytes, bool registered) const {
    return engine_->algorithm_for(collective, bytes, registered);
  }

  /// Whether all ranks have agreed on an added algorithm's schedules for this root; and the note that they have. The
  /// caller makes them agree before the first call with the algorithm.
  bool has_agreed_on(const Algorithm& algorithm, int root) const;
  void note_agreed(const Algorithm& algorithm, int root);

  const CallLog& calls() const { return engine_->calls(); }
  /// Logs that the group is made (base/log.h). `seconds`: how long that took.
  void tell_made(double seconds) const;

  /// The engine's selector (engine.h).
  const Selector& selector() const override { return engine_->selector(); }
  const Topology* topology() const { return engine_->topology(); }

  /// The host of each rank, numbered by first appearance.
  const std::vector<int>& host_of_rank() const override { return engine_->host_of_rank(); }

  /// Bytes that collectives sent to peers so far (0 if peers read them), and the number of open TCP connections.
  uint64_t bytes_sent() const { return engine_->bytes_sent(); }
  int connections() const { return engine_->connections(); }
  /// Bytes that collectives received from peers so far. From any thread.
  uint64_t bytes_received() const { return engine_->bytes_received(); }

  /// Ends pending and later calls of this rank with an error; peers see that it left.
  void abort(const std::string& reason);
  /// Leaves the group: pending calls are completed or, after `patience`, ended. Called by the destructor too.
  /// Throws InvalidUsage in a callback of one of its calls, and in a signal handler that interrupts a call. An
  /// interrupt (base/interrupts.h) ends the patience; it is thrown after the rank has left the group.
  void close(std::chrono::milliseconds patience);

  /// Ends a group on the thread that drops it. If that thread completes a call of the group, or is in a signal handler
  /// that interrupts one, another thread ends it later.
  static void dispose(Communicator* group) noexcept;

 private:
  void check_process() const;
  void leak() noexcept;
  template <typename Prepare>
  std::shared_ptr<Work> give(const Prepare& prepared);
  bool at_once() const;
  bool await_turn(std::chrono::milliseconds most);
  void await_own(Work& work, const std::function<std::string()>& what);
  bool completing() const;
  bool in_signal_handler() const;
  template <typename Act>
  void or_fail(const Act& act);
  uint64_t number();
  void prepare(Call& call);
  void prepare(Message& message);
  void run_now(const Call& call, bool background);
  void run_now(const Job& job, uint64_t sequence, bool background);
  void refuse_moved_blocks(const Call& call, size_t longest) const;
  void agree_on_blocks(const Call& call, Blocks& blocks, bool background);
  void tell_end() const;

  std::unique_ptr<Engine> engine_;
  const int rank_;
  const int world_;
  const bool ranks_are_threads_;
  const int owner_;  // the process that made it: a forked child's copy must not touch threads and peers
  std::atomic<std::chrono::milliseconds> timeout_;
  int max_ctas_ = 0;
  std::atomic<uint64_t> sequence_{0};
  std::atomic<bool> busy_{false};
  std::atomic<bool> closed_{false};
  std::shared_ptr<CallQueue> collectives_;  // always there
  std::shared_ptr<Messenger> messenger_;
  mutable std::mutex agreed_mutex_;
  std::set<std::pair<int, int>> agreed_;                     // (index_of, root); guarded by agreed_mutex_
  mutable std::atomic<uint64_t> last_agreed_{~uint64_t{0}};  // one of them, for a look without a lock
  mutable std::mutex gpus_mutex_;
  // By this rank's device number; guarded by gpus_mutex_. Shared with the threads that are in a call of theirs.
  std::map<int, std::shared_ptr<GpuGroup>> gpus_;
};

}  // namespace ringlet
