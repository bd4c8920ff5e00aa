#include "transport/wires.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <utility>

#include "base/error.h"
#include "transport/door.h"
#include "transport/socket_pipe.h"

namespace ringlet {
namespace {

using namespace std::chrono_literals;

constexpr auto kGlance = 1ms;           // while closing
constexpr auto kExamineEvery = 1000ms;  // how often a sleeper looks for hosts that vanished

Descriptor make_bell() {
  Descriptor bell(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
  if (!bell.valid()) throw_errno("eventfd");
  return bell;
}

void strike(const Descriptor& bell) noexcept {
  const uint64_t one = 1;
  // Only a full counter refuses it, and then whoever sleeps wakes anyway.
  [[maybe_unused]] const ssize_t written = ::write(bell.get(), &one, sizeof one);
}

void silence(const Descriptor& bell) noexcept {
  uint64_t rung;
  [[maybe_unused]] const ssize_t read = ::read(bell.get(), &rung, sizeof rung);  // none rung: nothing to read
}

/// One pipe, or the way to it.
struct Slot {
  std::atomic<Pipe*> pipe{nullptr};
  // Guarded by State::mutex.
  std::unique_ptr<Pipe> owned;
  bool making = false;
  bool failed = false;
  ErrorKind kind = ErrorKind::peer_lost;
  std::string reason;
};

}  // namespace

struct Wires::State final : Door::Resident {
  explicit State(Setup given) : setup(std::move(given)), owner(::getpid()), slots(setup.cards.size()) {
    for (Descriptor& bell : bells) bell = make_bell();
  }

  bool wants(int peer, Lane lane) noexcept override {
    if (peer < 0 || peer >= setup.world || peer == setup.rank) return false;
    const std::lock_guard lock(mutex);
    const Slot& slot = at(peer, lane);
    return !closed && slot.owned == nullptr && !slot.failed;
  }

  void admit(int peer, Lane lane, Descriptor socket) noexcept override {
    {
      const std::lock_guard lock(mutex);
      Slot& slot = at(peer, lane);
      if (closed || slot.owned != nullptr) return;
      slot.owned = std::make_unique<SocketPipe>(std::move(socket));
      slot.pipe.store(slot.owned.get(), std::memory_order_release);
      ++sockets;
    }
    ring_all();
  }

  void give_up(int peer, Lane lane, ErrorKind kind, const std::string& reason) noexcept override {
    {
      const std::lock_guard lock(mutex);
      Slot& slot = at(peer, lane);
      if (slot.owned != nullptr) return;
      slot.failed = true;
      slot.kind = kind;
      slot.reason = reason;
    }
    ring_all();
  }

  Slot& at(int peer, Lane lane) { return slots[peer][static_cast<size_t>(lane)]; }
  const Descriptor& bell(Lane lane) const { return bells[static_cast<size_t>(lane)]; }
  void ring_all() noexcept {
    for (const Descriptor& bell : bells) strike(bell);
  }
  void ask(int peer, Lane lane);

  template <typename Do>
  void for_each_pipe(Do act) const {
    for (const auto& lanes : slots) {
      for (const Slot& slot : lanes) {
        if (Pipe* pipe = slot.pipe.load(std::memory_order_acquire)) act(*pipe);
      }
    }
  }

  const Setup setup;
  const int owner;  // the process that made it: a forked child's copy must leave the connections alone
  std::vector<std::array<Slot, kLanes>> slots;
  std::array<Descriptor, kLanes> bells;
  std::array<Deadline, kLanes> examination{Deadline::after(0ms), Deadline::after(0ms), Deadline::after(0ms)};
  std::atomic<int> sockets{0};
  std::mutex mutex;
  bool closed = false;  // guarded by mutex
};

void Wires::State::ask(int peer, Lane lane) {
  const std::lock_guard lock(mutex);
  Slot& slot = at(peer, lane);
  if (slot.failed) {
    const bool lost = slot.kind == ErrorKind::peer_lost;
    rethrow(slot.kind, "rank " + std::to_string(setup.rank) + " cannot reach rank " + std::to_string(peer) + ": " +
                           slot.reason + (lost ? "; is its process gone, or a firewall between the hosts?" : ""));
  }
  if (slot.making || slot.owned != nullptr || closed || lane == Lane::incoming) return;
  Door::process().dial({.key = setup.key,
                        .from = static_cast<uint32_t>(setup.rank),
                        .to = static_cast<uint32_t>(peer),
                        .lane = lane,
                        .card = Card::unpack(setup.cards[peer])});
  slot.making = true;
}

Wires::Wires(Setup setup) : state_(std::make_shared<State>(std::move(setup))) {
  Door::process().enter(state_->setup.key, state_->setup.rank, state_);
}

Wires::~Wires() { close(Deadline::after(0ms)); }

std::string Wires::card() { return Door::process().card().pack(); }
int Wires::rank() const { return state_->setup.rank; }
int Wires::world() const { return state_->setup.world; }

Pipe* Wires::open(int peer, Lane lane) {
  Pipe* pipe = find(peer, lane);
  if (pipe == nullptr) state_->ask(peer, lane);
  return pipe;
}

Pipe* Wires::find(int peer, Lane lane) const noexcept {
  return state_->at(peer, lane).pipe.load(std::memory_order_acquire);
}

bool Wires::gone(int peer) const noexcept {
  for (const Slot& slot : state_->slots[peer]) {
    const Pipe* pipe = slot.pipe.load(std::memory_order_acquire);
    pollfd watched{pipe != nullptr ? pipe->descriptor() : -1, POLLRDHUP, 0};
    if (pipe != nullptr && ::poll(&watched, 1, 0) > 0) return true;
  }
  return false;
}

void Wires::about_to_sleep(Lane) noexcept {}

void Wires::sleep(Lane lane, std::span<const Watch> watches, int64_t nanoseconds) noexcept {
  std::vector<pollfd> watched{{state_->bell(lane).get(), POLLIN, 0}};
  for (const Watch& each : watches) {
    const short events = static_cast<short>((each.reading ? POLLIN : 0) | (each.writing ? POLLOUT : 0));
    watched.push_back({each.pipe->descriptor(), events, 0});
  }
  const timespec limit{nanoseconds / 1'000'000'000, nanoseconds % 1'000'000'000};
  ::ppoll(watched.data(), watched.size(), &limit, nullptr);
  silence(state_->bell(lane));
}

void Wires::ring() noexcept { state_->ring_all(); }

uint64_t Wires::bytes_sent() const noexcept {
  uint64_t bytes = 0;
  state_->for_each_pipe([&](Pipe& pipe) { bytes += pipe.bytes_written(); });
  return bytes;
}
uint64_t Wires::bytes_received() const noexcept {
  uint64_t bytes = 0;
  state_->for_each_pipe([&](Pipe& pipe) { bytes += pipe.bytes_read(); });
  return bytes;
}
int Wires::connections() const noexcept { return state_->sockets.load(std::memory_order_relaxed); }

void Wires::close(const Deadline& deadline) noexcept {
  if (state_->owner != ::getpid()) return;
  {
    const std::lock_guard lock(state_->mutex);
    if (std::exchange(state_->closed, true)) return;
  }
  Door::process().leave(state_->setup.key, state_->setup.rank);
  state_->for_each_pipe([](Pipe& pipe) { pipe.finish(); });
  for (;;) {
    bool delivered = true;
    state_->for_each_pipe([&](Pipe& pipe) { delivered = delivered && pipe.delivered(); });
    if (delivered || deadline.passed()) break;
    sleep(Lane::collectives, {}, std::chrono::nanoseconds(kGlance).count());
  }
  for (auto& lanes : state_->slots) {
    for (Slot& slot : lanes) {
      slot.pipe.store(nullptr, std::memory_order_release);
      slot.owned.reset();
    }
  }
}

}  // namespace ringlet
