#include "transport/mesh.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <exception>
#include <functional>
#include <mutex>
#include <new>
#include <utility>

#include "base/error.h"
#include "base/interrupts.h"
#include "base/log.h"
#include "base/process.h"
#include "base/system_call.h"
#include "transport/listener.h"
#include "transport/ring_pipe.h"
#include "transport/socket_pipe.h"

namespace ringlet {
namespace {

using namespace std::chrono_literals;

constexpr auto kGlance = 1ms;           // the longest sleep while closing
constexpr auto kExamineEvery = 1000ms;  ///< how often a sleeper asks the system about silent connections: their hosts
                                        ///< may have vanished

constexpr size_t kKinds = std::size(kConnectionKinds);

/// A pipe, or the state of its connection.
struct Slot {
  std::atomic<Pipe*> pipe{nullptr};
  // Guarded by State::mutex.
  std::unique_ptr<Pipe> owned;
  bool making = false;
  bool failed = false;
  ErrorKind kind = ErrorKind::peer_lost;
  std::string reason;
  Deadline::Clock::time_point asked{};  // if `making`
};

const char* name(ConnectionKind which) noexcept {
  return which == ConnectionKind::collectives ? "collectives" : "messages";
}

}  // namespace

struct Mesh::State final : Listener::Resident {
  explicit State(Setup given) : setup(std::move(given)), owner(this_process()), slots(setup.hosts.size()) {
    check();
    if (far() && logging(LogLevel::info)) tell_addresses();
    for (Descriptor& wakeup : own_wakeups) {
      if (!setup.local) wakeup = make_wakeup();
    }
    for (int peer = 0, place = 0; setup.local && peer < setup.world; ++peer) {
      if (setup.hosts[peer] != setup.hosts[setup.rank]) continue;
      if (peer != setup.rank) join(peer, place);
      ++place;
    }
  }

  void check() const;
  /// Whether a rank is on another host.
  bool far() const { return !setup.local || setup.local->world() < setup.world; }
  void tell_addresses() const;
  void tell_made(int peer, ConnectionKind which, const Socket& socket, const Slot& slot) const;

  /// Rings exist from the start, because the memory is there.
  void join(int peer, int place) {
    for (const ConnectionKind which : kConnectionKinds) {
      if (!setup.local->layout().has_ring(which)) continue;
      Slot& slot = at(peer, which);
      slot.owned = std::make_unique<RingPipe>(*setup.local, place, which, setup.timed_copy_bytes);
      slot.pipe.store(slot.owned.get(), std::memory_order_release);
    }
  }

  bool wants(int peer, ConnectionKind which) noexcept override {
    if (peer < 0 || peer >= setup.world || peer == setup.rank) return false;
    const std::lock_guard lock(mutex);
    const Slot& slot = at(peer, which);
    return !closed && slot.owned == nullptr;  // also if this rank's connector failed, because the peer's may succeed
  }

  void admit(int peer, ConnectionKind which, const std::function<Socket()>& take) noexcept override {
    try {
      const std::lock_guard lock(mutex);
      Slot& slot = at(peer, which);
      if (closed || slot.owned != nullptr) return;
      Socket socket = take();
      if (!socket.valid()) return;  // the connection ended meanwhile
      if (logging(LogLevel::info)) tell_made(peer, which, socket, slot);
      slot.owned = std::make_unique<SocketPipe>(std::move(socket));
      slot.pipe.store(slot.owned.get(), std::memory_order_release);
      ++sockets;
    } catch (const std::bad_alloc&) {
      return give_up(peer, which, ErrorKind::resource_error, kOutOfMemory);
    }
    wake_all();
  }

  void give_up(int peer, ConnectionKind which, ErrorKind kind, const std::string& reason) noexcept override {
    {
      const std::lock_guard lock(mutex);
      Slot& slot = at(peer, which);
      slot.failed = true;
      slot.kind = kind;
      slot.reason = in_words([&] { return reason; });
    }
    if (logging(LogLevel::warning)) {
      log(LogLevel::warning, source,
          in_words([&] { return "no connection to rank " + std::to_string(peer) + ": " + reason; }));
    }
    wake_all();
  }

  Slot& at(int peer, ConnectionKind which) { return slots[peer][static_cast<size_t>(which)]; }
  int wakeup(ConnectionKind which) const {
    return setup.local ? setup.local->wakeup(setup.local->rank(), which)
                       : own_wakeups[static_cast<size_t>(which)].get();
  }
  void wake_all() noexcept {
    for (const ConnectionKind which : kConnectionKinds) signal_wakeup(wakeup(which));
  }
  void mark_asleep(ConnectionKind which, bool asleep) noexcept {
    if (!setup.local) return;
    setup.local->control().asleep[static_cast<size_t>(which)].store(asleep, std::memory_order_seq_cst);
  }
  void ask(int peer, ConnectionKind which);  // mutex is held

  template <typename Do>
  void for_each_pipe(Do act) const {
    for (const auto& kinds : slots) {
      for (const Slot& slot : kinds) {
        if (Pipe* pipe = slot.pipe.load(std::memory_order_acquire)) act(*pipe);
      }
    }
  }

  const Setup setup;
  const LogSource source{setup.rank, setup.world, setup.group};
  const int owner;  // the process that made it: a forked child must not touch the connections
  std::vector<std::array<Slot, kKinds>> slots;
  std::array<Descriptor, kKinds> own_wakeups;  // if `local` has none
  std::array<std::atomic<Deadline>, kKinds> examination{Deadline::after(0ms), Deadline::after(0ms)};
  std::atomic<int> sockets{0};
  std::mutex mutex;
  bool retired = false, ended = false;  // for the caller's threads
  bool closed = false;                  // guarded by mutex
};

void Mesh::State::check() const {
  const size_t world = setup.world < 1 ? 0 : static_cast<size_t>(setup.world);
  if (setup.rank < 0 || setup.rank >= setup.world || setup.hosts.size() != world ||
      (far() && setup.addresses.size() != world)) {
    throw InvalidUsage("a mesh for rank " + std::to_string(setup.rank) + " of " + std::to_string(setup.world) +
                       " needs one address and one host for each rank, got " + std::to_string(setup.addresses.size()) +
                       " and " + std::to_string(setup.hosts.size()));
  }
  const auto together = std::count(setup.hosts.begin(), setup.hosts.end(), setup.hosts[setup.rank]);
  if (setup.local ? setup.local->world() != together : together != 1) {
    throw InvalidUsage("rank " + std::to_string(setup.rank) + " shares its host with " + std::to_string(together - 1) +
                       " other ranks, but is joined by shared memory to " +
                       std::to_string(setup.local ? setup.local->world() - 1 : 0));
  }
  if (setup.local && far() && !setup.local->layout().has_ring(ConnectionKind::collectives)) {
    throw InvalidUsage("a mesh of several hosts needs a transport with rings for all kinds of connection (Rings::all)");
  }
}

void Mesh::State::ask(int peer, ConnectionKind which) {
  Slot& slot = at(peer, which);
  if (slot.failed) {
    rethrow(slot.kind,
            "rank " + std::to_string(setup.rank) + " cannot reach rank " + std::to_string(peer) + ": " + slot.reason);
  }
  if (slot.making || slot.owned != nullptr || closed) return;
  Listener::process().connect_to({.key = setup.key,
                                  .from = static_cast<uint32_t>(setup.rank),
                                  .to = static_cast<uint32_t>(peer),
                                  .which = which,
                                  .address = PeerAddress::unpack(setup.addresses[peer])});
  slot.making = true;
  slot.asked = Deadline::Clock::now();
}

/// Logs the addresses of each rank; those of this rank are the ones on which it listens.
void Mesh::State::tell_addresses() const {
  const char* chosen = std::getenv("RINGLET_INTERFACE");
  for (int q = 0; q < setup.world; ++q) {
    if (q != setup.rank && setup.hosts[q] == setup.hosts[setup.rank]) continue;  // reached through shared memory
    const PeerAddress address = PeerAddress::unpack(setup.addresses[q]);
    std::string text = q == setup.rank ? "listens at" : "rank " + std::to_string(q) + " can be reached at";
    for (const Address& address : address.addresses) text += " " + address.text();
    text += ", port " + std::to_string(address.port);
    if (q == setup.rank && chosen != nullptr) text += std::string(" (RINGLET_INTERFACE=") + chosen + ")";
    log(LogLevel::info, source, text);
  }
}

/// Logs a new connection: which end made it, between which addresses.
void Mesh::State::tell_made(int peer, ConnectionKind which, const Socket& socket, const Slot& slot) const {
  const std::string own = own_end(socket), other = other_end(socket);
  const bool accepted = own.ends_with(":" + std::to_string(PeerAddress::unpack(setup.addresses[setup.rank]).port));
  std::string text = accepted ? "accepted a connection from rank " : "connected to rank ";
  text += std::to_string(peer) + " (" + name(which) + "): " + own + (accepted ? " <- " : " -> ") + other;
  if (slot.making) {
    const std::chrono::duration<double> took = Deadline::Clock::now() - slot.asked;
    text += ", " + in_time_units(took.count()) + " after it was first needed";
  }
  log(LogLevel::info, source, text);
}

Mesh::Mesh(Setup setup) : state_(std::make_shared<State>(std::move(setup))) {
  if (state_->far()) Listener::process().enter(state_->setup.key, state_->setup.rank, state_);
}

Mesh::~Mesh() { close(Deadline::after(0ms)); }

std::string Mesh::address(const std::string& store) { return Listener::process().address(store).pack(); }
int Mesh::rank() const { return state_->setup.rank; }
int Mesh::world() const { return state_->setup.world; }
Transport* Mesh::local() const { return state_->setup.local.get(); }

Pipe* Mesh::open(int peer, ConnectionKind which) {
  Pipe* pipe = find(peer, which);
  if (pipe != nullptr) return pipe;
  const std::lock_guard lock(state_->mutex);
  state_->ask(peer, which);
  return nullptr;
}

Pipe* Mesh::find(int peer, ConnectionKind which) const noexcept {
  return state_->at(peer, which).pipe.load(std::memory_order_acquire);
}

bool Mesh::gone(int peer, bool receiving) const noexcept {
  const Pipe* messages = receiving ? find(peer, ConnectionKind::messages) : nullptr;
  if (messages != nullptr) return messages->ended();
  for (const Slot& slot : state_->slots[peer]) {
    const Pipe* pipe = slot.pipe.load(std::memory_order_acquire);
    if (pipe == nullptr) continue;
    const bool ring = dynamic_cast<const RingPipe*>(pipe) != nullptr;  // a ring's descriptor watches the process
    if (events_now(pipe->descriptor(), ring ? POLLIN : POLLRDHUP) != 0 || pipe->ended()) return true;
  }
  return false;
}

void Mesh::about_to_sleep(ConnectionKind which) noexcept { state_->mark_asleep(which, true); }

void Mesh::sleep(ConnectionKind which, std::span<const Watch> watches, int64_t nanoseconds) noexcept {
  std::array<bool, kKinds> rings{};  // the kinds whose wakeups are listened to: those of watched rings, too
  rings[static_cast<size_t>(which)] = true;
  std::atomic<Deadline>& examination = state_->examination[static_cast<size_t>(which)];
  const bool examine = examination.load(std::memory_order_relaxed).passed();
  if (examine) examination.store(Deadline::after(kExamineEvery), std::memory_order_relaxed);
  thread_local std::vector<pollfd> watched;  // for several threads at once; kept, so that a sleep allocates nothing
  watched.clear();
  try {
    watched.reserve(watches.size() + kKinds);
  } catch (const std::bad_alloc&) {  // a sleep that nothing ends is short
    sleep_for(std::min<std::chrono::nanoseconds>(std::chrono::nanoseconds(nanoseconds), kGlance));
    return;
  }
  for (const Watch& each : watches) {
    const auto* ring = dynamic_cast<const RingPipe*>(each.pipe);
    const auto* socket = ring == nullptr ? static_cast<const SocketPipe*>(each.pipe) : nullptr;
    // Its descriptor would end this and every later sleep at once. An end that the caller has not seen yet may.
    if (socket != nullptr ? socket->known_to_have_ended() : ring->ended()) continue;
    const bool input = each.reading || ring != nullptr, room = each.writing && ring == nullptr;
    const short events = static_cast<short>((input ? POLLIN : 0) | (room ? POLLOUT : 0));
    watched.push_back({each.pipe->descriptor(), events, 0});  // a ring's only shows the end of the peer's process
    if (ring != nullptr) rings[static_cast<size_t>(ring->kind())] = true;
    if (socket != nullptr && examine) socket->examine();
  }
  for (const ConnectionKind each : kConnectionKinds) {
    if (rings[static_cast<size_t>(each)]) watched.push_back({state_->wakeup(each), POLLIN, 0});
  }
  const timespec limit{nanoseconds / 1'000'000'000, nanoseconds % 1'000'000'000};
  ::ppoll(watched.data(), watched.size(), &limit, nullptr);
  for (const ConnectionKind each : kConnectionKinds) {
    if (!rings[static_cast<size_t>(each)]) continue;
    state_->mark_asleep(each, false);
    drain_wakeup(state_->wakeup(each));
  }
}

void Mesh::wake_all() noexcept { state_->wake_all(); }

int Mesh::connections() const noexcept { return state_->sockets.load(std::memory_order_relaxed); }

void Mesh::retire(std::vector<std::byte> final_frame) noexcept {
  if (state_->owner != this_process() || std::exchange(state_->retired, true)) return;
  if (state_->far()) Listener::process().leave(state_->setup.key, state_->setup.rank, std::move(final_frame));
  const std::lock_guard lock(state_->mutex);
  state_->closed = true;
}

bool Mesh::delivered() const noexcept {
  bool delivered = true;
  state_->for_each_pipe([&](Pipe& pipe) { delivered = pipe.delivered() && delivered; });
  return delivered;
}

void Mesh::close(const Deadline& deadline) {
  if (state_->owner != this_process() || std::exchange(state_->ended, true)) return;
  retire({});
  state_->for_each_pipe([](Pipe& pipe) { pipe.finish(); });
  const auto has_sent = [&] {
    bool sent = true;
    state_->for_each_pipe([&](Pipe& pipe) {
      const bool ring = dynamic_cast<const RingPipe*>(&pipe) != nullptr;  // what lies in it stays there
      sent = (ring || pipe.delivered()) && sent;
    });
    return sent;
  };
  std::exception_ptr interrupted;
  while (!interrupted && !deadline.passed() && !has_sent()) {
    interrupted = caught_interrupt();
    sleep(ConnectionKind::collectives, {}, std::chrono::nanoseconds(kGlance).count());
  }
  state_->for_each_pipe([](Pipe& pipe) { pipe.close(); });
  state_->sockets.store(0, std::memory_order_relaxed);
  if (interrupted) std::rethrow_exception(interrupted);
}

}  // namespace ringlet
