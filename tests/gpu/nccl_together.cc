#include "nccl_together.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <map>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#include "section.h"

namespace gpu_check {

using namespace ringlet;

namespace {

using Clock = std::chrono::steady_clock;
constexpr std::chrono::seconds kPatience{10};           // for ranks that do not come
constexpr std::chrono::seconds kRendezvous{30};         // for NCCL, to bring ranks together
constexpr std::chrono::seconds kEnding{10};             // for NCCL, to end what it has
constexpr std::chrono::seconds kLook{1};                // from one look at the clock to the next
constexpr std::chrono::microseconds kBeforeSleep{100};  // a group is handed over faster than a thread is woken

struct Operation {
  enum Kind { send, recv, all_reduce };
  Kind kind;
  const void* from;
  void* to;
  size_t count;
  int type;
  int other;  // the peer, or the operation
  NcclComm comm;
  NcclStream stream;

  int make(const NcclApi& api) const {
    if (kind == send) return api.send(from, count, type, other, comm, stream);
    if (kind == recv) return api.recv(to, count, type, other, comm, stream);
    return api.all_reduce(from, to, count, type, other, comm, stream);
  }
};
using Group = std::vector<Operation>;

struct Joining {
  int rank;
  NcclUniqueId id;
  NcclConfig config;
};

}  // namespace

/// What the rank threads and the driver share; each keeps it alive.
struct NcclTogether::State {
  State(const NcclApi& real, int world) : real(real), world(world) {}

  const NcclApi real;  // a copy: a driver that hangs may outlive the caller's
  const int world;

  std::mutex mutex;
  std::condition_variable changed;
  std::atomic<uint64_t> changes{0};
  // Guarded by the mutex:
  std::vector<Joining> joining;
  std::map<int, NcclComm> joined;
  int join_result = kNcclInProgress;
  int inside = 0;  // ranks that are to hand over a group or leave
  std::vector<Group> handed;
  Clock::time_point first_handed{};
  uint64_t rounds = 0;  // groups that are done
  int result = kNcclSuccess;
  std::set<NcclComm> alive, to_abort;
  bool aborting = false, aborted = false, ending = false, ended = false;

  void change() {
    ++changes;
    changed.notify_all();
  }

  /// Until `ready`: awake for a while, then asleep. False at the limit.
  template <class Ready>
  bool await(std::unique_lock<std::mutex>& lock, Clock::duration limit, Ready ready) {
    const auto end = Clock::now() + limit;
    while (!ready()) {
      const uint64_t seen = changes;
      lock.unlock();
      for (const auto awake = Clock::now() + kBeforeSleep; changes == seen && Clock::now() < awake;) {
        std::this_thread::yield();
      }
      lock.lock();
      if (!changed.wait_until(lock, end, [&] { return changes != seen; })) return ready();
    }
    return true;
  }

  bool all_joined() const { return joining.size() == static_cast<size_t>(world); }
  bool all_handed() const { return !handed.empty() && handed.size() == static_cast<size_t>(inside); }
  bool given_up() const { return !handed.empty() && Clock::now() > first_handed + kPatience; }

  void drive();
  void join(std::unique_lock<std::mutex>& lock);
  void move(std::unique_lock<std::mutex>& lock);
  void abort_some(std::unique_lock<std::mutex>& lock);
  int move_together(const std::vector<Group>& groups) const;
  std::vector<NcclComm> join_together(const std::vector<Joining>& ranks, int& result) const;
};

namespace {

std::mutex current_mutex;  // guards these two
std::shared_ptr<NcclTogether::State> current;
std::map<NcclComm, std::weak_ptr<NcclTogether::State>> owners;

// Of a rank's thread:
thread_local std::shared_ptr<NcclTogether::State> mine;
thread_local int open_groups = 0;
thread_local Group group;

std::shared_ptr<NcclTogether::State> owner_of(NcclComm comm) {
  const std::lock_guard lock(current_mutex);
  const auto found = owners.find(comm);
  return found == owners.end() ? nullptr : found->second.lock();
}

int join(NcclComm* comm, int, NcclUniqueId id, int rank, NcclConfig* config) {
  {
    const std::lock_guard lock(current_mutex);
    mine = current;
  }
  std::unique_lock lock(mine->mutex);
  mine->joining.push_back({rank, id, *config});
  mine->change();
  if (!mine->await(lock, kRendezvous, [] { return mine->join_result != kNcclInProgress; })) return kNcclRemoteError;
  if (mine->join_result != kNcclSuccess) return mine->join_result;
  *comm = mine->joined.at(rank);
  const std::lock_guard owners_lock(current_mutex);
  owners[*comm] = mine;
  return kNcclSuccess;
}

int open_group() { return ++open_groups, kNcclSuccess; }

/// Hands the group over, and waits for what became of it.
int close_group() {
  if (--open_groups > 0) return kNcclSuccess;
  std::unique_lock lock(mine->mutex);
  const uint64_t before = mine->rounds;
  if (mine->handed.empty()) mine->first_handed = Clock::now();
  mine->handed.push_back(std::move(group));
  group.clear();
  mine->change();
  // Whoever does not come is given up by the driver; this is for a driver that does not come back.
  if (!mine->await(lock, 2 * kPatience, [&] { return mine->rounds > before; })) return kNcclRemoteError;
  return mine->result;
}

/// Outside a group it is one by itself.
int add(const Operation& operation) {
  open_group();
  group.push_back(operation);
  return close_group();
}

/// Noted, and done by the driver when it comes to it.
int abort(NcclComm comm) {
  const auto state = owner_of(comm);
  if (!state) return kNcclSuccess;
  const std::lock_guard lock(state->mutex);
  if (state->alive.erase(comm) != 0) state->to_abort.insert(comm);
  state->change();
  return kNcclSuccess;
}

}  // namespace

std::vector<NcclComm> NcclTogether::State::join_together(const std::vector<Joining>& ranks, int& result) const {
  std::vector<NcclComm> comms(ranks.size());
  std::vector<NcclConfig> configs;
  for (const Joining& one : ranks) configs.push_back(one.config);
  const auto keep = [&](int code) {
    if (code != kNcclSuccess && code != kNcclInProgress && result == kNcclSuccess) result = code;
  };
  result = kNcclSuccess;
  keep(real.group_start());
  for (size_t i = 0; i < ranks.size(); ++i) {
    configs[i].blocking = 1;
    keep(real.comm_init_rank_config(&comms[i], world, ranks[0].id, ranks[i].rank, &configs[i]));
  }
  keep(real.group_end());
  return comms;
}

void NcclTogether::State::join(std::unique_lock<std::mutex>& lock) {
  const std::vector<Joining> ranks = std::move(joining);
  joining.clear();
  lock.unlock();
  int code = kNcclSuccess;
  const std::vector<NcclComm> comms = join_together(ranks, code);
  lock.lock();
  for (size_t i = 0; i < ranks.size() && code == kNcclSuccess; ++i) {
    joined[ranks[i].rank] = comms[i];
    alive.insert(comms[i]);
  }
  join_result = code;
}

int NcclTogether::State::move_together(const std::vector<Group>& groups) const {
  int first = kNcclSuccess;
  const auto keep = [&](int code) {
    if (code != kNcclSuccess && code != kNcclInProgress && first == kNcclSuccess) first = code;
  };
  keep(real.group_start());
  for (const Group& one : groups) {
    for (const Operation& operation : one) keep(operation.make(real));
  }
  keep(real.group_end());
  return first;
}

void NcclTogether::State::move(std::unique_lock<std::mutex>& lock) {
  const bool complete = all_handed();
  const std::vector<Group> groups = std::move(handed);
  handed.clear();
  lock.unlock();
  const int code = complete ? move_together(groups) : kNcclRemoteError;
  lock.lock();
  result = code;
  ++rounds;
}

void NcclTogether::State::abort_some(std::unique_lock<std::mutex>& lock) {
  const std::set<NcclComm> comms = std::move(to_abort);
  to_abort.clear();
  aborting = aborted = true;
  lock.unlock();
  for (NcclComm comm : comms) real.comm_abort(comm);
  lock.lock();
  aborting = false;
}

void NcclTogether::State::drive() {
  std::unique_lock lock(mutex);
  while (!ending || !to_abort.empty()) {
    const auto work = [&] { return all_joined() || all_handed() || given_up() || !to_abort.empty() || ending; };
    if (!await(lock, kLook, work)) continue;
    if (all_joined()) {
      join(lock);
    } else if (!to_abort.empty()) {
      abort_some(lock);
    } else if (all_handed() || given_up()) {
      move(lock);
    }
    change();
  }
  const std::set<NcclComm> comms = std::move(alive);
  alive.clear();
  lock.unlock();
  for (NcclComm comm : comms) aborted ? real.comm_abort(comm) : real.comm_destroy(comm);
  lock.lock();
  ended = true;
  change();
}

NcclTogether::NcclTogether(const NcclApi& real, int world, std::function<void()> begin)
    : api_(real), state_(std::make_shared<State>(real, world)) {
  api_.comm_init_rank_config = join;
  api_.comm_finalize = [](NcclComm) { return kNcclSuccess; };
  api_.comm_destroy = [](NcclComm) { return kNcclSuccess; };
  api_.comm_abort = abort;
  api_.group_start = open_group;
  api_.group_end = close_group;
  api_.send = [](const void* from, size_t bytes, int type, int peer, NcclComm comm, NcclStream stream) {
    return add({Operation::send, from, nullptr, bytes, type, peer, comm, stream});
  };
  api_.recv = [](void* to, size_t bytes, int type, int peer, NcclComm comm, NcclStream stream) {
    return add({Operation::recv, nullptr, to, bytes, type, peer, comm, stream});
  };
  api_.all_reduce = [](const void* from, void* to, size_t count, int type, int op, NcclComm comm, NcclStream stream) {
    return add({Operation::all_reduce, from, to, count, type, op, comm, stream});
  };
  std::thread([state = state_, begin = std::move(begin)] {
    begin();
    state->drive();
  }).detach();
  const std::lock_guard lock(current_mutex);
  current = state_;
}

NcclTogether::~NcclTogether() {
  std::unique_lock lock(state_->mutex);
  state_->ending = true;
  state_->change();
  if (!state_->await(lock, kEnding, [&] { return state_->ended; })) {
    device_hangs = true;
    say("NCCL does not come back from ending its communicators; the device is left alone from here on");
  }
}

void NcclTogether::enter() {
  const std::lock_guard lock(state_->mutex);
  state_->inside = state_->world;
}

void NcclTogether::leave() {
  const std::lock_guard lock(state_->mutex);
  --state_->inside;
  state_->change();
}

bool NcclTogether::abort_all() {
  std::unique_lock lock(state_->mutex);
  state_->to_abort.merge(state_->alive);
  state_->change();
  return state_->await(lock, kEnding, [&] { return state_->to_abort.empty() && !state_->aborting; });
}

}  // namespace gpu_check
