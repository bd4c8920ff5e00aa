// A group's calls on tensors of one GPU of this rank: order, deadlines, and Works that complete.
//
// Contract: the constructor is a collective of the host's group (gpu/gpu_executors.h); where it throws the host's
// group goes on. run() checks the call, enqueues it behind what is on the caller's stream and behind the call before,
// and returns; its Work completes when the device is done. A call that becomes part of a CUDA graph waits for none that
// is not, and what replays the graph must order it after other calls. A thread of the group's own ends what is not done
// at its deadline, also while the caller waits in a launch because the device takes no more: then that Work, the
// caller, and every later call throw Timeout. All ranks make the same calls in the same order. Those that differ are
// InvalidUsage through peers' memory, which names both; NCCL compares nothing, so there they end with a Timeout.
// Ownership: the host's group outlives it; tensors must stay until the stream has passed the call. The device must be
// current in the constructor and run(). Thread safety: from any thread; one call at a time; end() beside all others.
#pragma once

#include <condition_variable>
#include <exception>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "engine/work.h"
#include "gpu/gpu_executors.h"

namespace ringlet {

class GpuGroup {
 public:
  GpuGroup(HostGroup& host, const GpuExecutors::Parts& parts);
  ~GpuGroup() { end(); }
  GpuGroup(const GpuGroup&) = delete;
  GpuGroup& operator=(const GpuGroup&) = delete;

  /// call.timeout zero: the group's. A call that becomes part of a CUDA graph is complete at once, and has no deadline.
  std::shared_ptr<Work> run(Call call, void* stream);
  /// Point-to-point messages that move together, as GpuMessageExecutor::exchange; none has a tag, or any source.
  std::shared_ptr<Work> exchange(std::vector<Message> messages, void* stream);

  /// What the caller puts on the stream next comes after all calls so far.
  void follow_calls(void* stream);

  /// Ends pending and later calls with this reason; from any device.
  void abort(const std::string& reason);
  /// Waits a moment for pending calls, then ends them. Later calls throw InvalidUsage. One thread at a time.
  void end();

  /// The number of the stream for asynchronous calls. The code that makes the calls sets and uses it.
  std::optional<int64_t>& side_stream() { return side_stream_; }

  /// Whether the caller is the thread that completes calls.
  bool is_this_thread() const { return std::this_thread::get_id() == watch_.get_id(); }

  /// Whether ranks are threads, which would wait for each other on the default stream.
  bool shares_default_stream() const { return shares_default_stream_; }

  /// Describes what calls run on.
  const std::string& describe() const { return description_; }

 private:
  struct Pending {
    void* event;
    void* stream;
    Deadline deadline;
    std::string what;
    std::shared_ptr<Work> work;
  };
  using Ended = std::vector<std::pair<std::shared_ptr<Work>, std::exception_ptr>>;

  /// What is being put on a stream.
  struct Launch {
    Deadline deadline;
    std::function<std::string()> what;
  };

  std::shared_ptr<Work> give(void* stream, std::chrono::milliseconds timeout, const std::function<void()>& enqueue,
                             const std::function<std::string()>& what);
  void begin(const Launch& launch, void* stream, bool captured);
  void* last_elsewhere(void* stream) const;
  void watch();
  void look(Ended& ended);
  void end_all(const Error& error, Ended& ended);
  std::string late() const;
  std::string oldest() const;
  std::string behind_oldest(const Timeout& error);
  std::string not_done(const std::string& call) const;
  void check();
  void look_at_peers();
  size_t finished() const;
  size_t finished_as_far_as_known();
  void answer_watch();
  void* event();
  bool dismiss();

  HostGroup& host_;
  // Ends in the thread that is on the device. That thread holds order_ and mutex_ when it takes it; null from then on.
  std::unique_ptr<GpuExecutors> engines_;
  const RingletCudaDevice& device_;
  const int number_;  // of the device
  const bool shares_default_stream_;
  const std::string description_;
  std::optional<int64_t> side_stream_;

  // Two locks, so that the watch is never behind a caller who waits in a launch.
  std::mutex order_;       // held while a call is put on a stream; first
  uint64_t sequence_ = 0;  // guarded by order_

  std::mutex mutex_;  // guards all that follows; nobody waits for the device with it
  std::condition_variable changed_;
  std::list<Pending> pending_;
  std::optional<Launch>
      launch_;                 // the watch asks the device nothing meanwhile: a launch that waits has the driver's lock
  bool wanted_ = false;        // the watch would have: who launches asks for it
  size_t known_ = 0;           // ... so many pending calls were finished
  std::exception_ptr ended_;   // why nothing is taken any more
  std::vector<void*> events_;  // that are free
  std::optional<Deadline> stop_;  // until when pending calls may go on
  Deadline next_look_ = Deadline::after(std::chrono::milliseconds(0));
  std::thread watch_;  // last: starts when all else is there
};

}  // namespace ringlet
