// A GPU and a NCCL of the host that run, as a library with the names that ringlet looks for: every stream is a thread,
// every rank is a thread of this process, and a message is a copy. What a rank's host does not wait for is really under
// way, so a wait that is missing can show, and what never comes keeps a stream busy until the communicator is aborted.
// recording_nccl.h is the one to explore orders of events; this one serves tests of what enqueues, completes and gives
// up.
#include "emulated_gpu.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "cuda/device_library.h"
#include "gpu/nccl_api.h"
#include "host_block.h"

using namespace ringlet;

namespace {

constexpr int kInvalidUsage = 5;  // ncclInvalidUsage

// What threads share is never destroyed: one may be inside NCCL when the process ends.
auto& mutex = *new std::mutex;  // guards every flag, mailbox and communicator
auto& changed = *new std::condition_variable;

struct Flag {
  bool up = false;
};

void raise(const std::shared_ptr<Flag>& flag) {
  const std::lock_guard lock(mutex);
  flag->up = true;
  changed.notify_all();
}

std::atomic<size_t> launch_queue{1024};  // of a stream: a launch beyond waits, as CUDA's do

class Stream {
 public:
  Stream() : thread_([this] { loop(); }) {
    change([this](std::set<Stream*>& all) { all.insert(this); });
  }
  ~Stream() {
    put([this] { ended_ = true; }, /*bounded=*/false);
    thread_.join();
    const std::lock_guard launch(*driver_);                       // one that waited for room may still be inside
    change([this](std::set<Stream*>& all) { all.erase(this); });  // last: memory outlives what is still to be done
  }
  /// While a launch waits for room it holds the driver's lock, for which other questions about the stream wait.
  void put(std::function<void()> item, bool bounded = true) {
    std::unique_lock driver(*driver_, std::defer_lock);
    if (bounded) driver.lock();
    std::unique_lock lock(own_);
    room_.wait(lock, [&] { return !bounded || items_.size() < launch_queue; });
    items_.push_back(std::move(item));
    any_.notify_one();
  }
  const std::shared_ptr<std::mutex>& driver() const { return driver_; }
  void hold(bool held) {
    const std::lock_guard lock(own_);
    held_ = held;
    any_.notify_one();
  }
  /// Lets `memory` go when all streams have done what they have been given.
  static void outlive(const std::shared_ptr<void>& memory) {
    change([&](std::set<Stream*>& all) {
      for (Stream* stream : all) stream->put([memory] {}, /*bounded=*/false);
    });
  }

 private:
  static void change(const std::function<void(std::set<Stream*>&)>& act) {
    static auto* const mutex = new std::mutex;  // streams end when statics are gone
    static auto* const all = new std::set<Stream*>;
    const std::lock_guard lock(*mutex);
    act(*all);
  }
  void loop() {
    while (!ended_) {
      std::function<void()> item;
      {
        std::unique_lock lock(own_);
        any_.wait(lock, [this] { return !items_.empty() && !held_; });
        item = std::move(items_.front());
        items_.pop_front();
        room_.notify_all();
      }
      item();
    }
  }

  const std::shared_ptr<std::mutex> driver_ = std::make_shared<std::mutex>();
  std::mutex own_;
  std::condition_variable any_, room_;
  std::deque<std::function<void()>> items_;
  bool held_ = false;
  bool ended_ = false;  // its own thread's
  std::thread thread_;
};

Stream& of(void* stream) {
  // Each thread's own, or ranks would stand in each other's way. NCCL refuses it: another thread makes its calls.
  thread_local Stream usual;
  return stream == nullptr ? usual : *static_cast<Stream*>(stream);
}

struct Event {
  std::shared_ptr<Flag> last;
  std::shared_ptr<std::mutex> driver;
};

/// One rank's communicator; those of one id meet in its mailboxes.
struct Communicator {
  std::string id;
  int rank;
  int world;
  bool aborted = false;
};

auto& present = *new std::map<std::string, std::set<int>>;  // by id: the ranks that came
// By id, from and to.
auto& boxes = *new std::map<std::tuple<std::string, int, int>, std::deque<std::vector<std::byte>>>;
auto& communicators = *new std::vector<std::unique_ptr<Communicator>>;
auto& opened = *new std::multiset<void*>;  // memory of other ranks
std::atomic<int> allocations{0}, in_place{0}, loads{0}, messages{0}, most_blocks{0}, max_ctas{0}, low_latencies{0};
std::atomic<bool> capturing{false};
long ids = 0;

struct Part {
  bool sends;
  int peer;
  std::byte* address;
  size_t bytes;
  Communicator* communicator;
};
thread_local int open_groups = 0;
thread_local std::map<void*, std::vector<Part>> parts;  // of the group being put together, by stream

/// Atomic by words, which a kernel or an abort may read or write meanwhile.
void copy_words(std::byte* dst, const std::byte* src, size_t bytes) {
  size_t i = 0;
  for (; i + 8 <= bytes && (reinterpret_cast<uintptr_t>(dst) | reinterpret_cast<uintptr_t>(src)) % 8 == 0; i += 8) {
    auto* from = reinterpret_cast<uint64_t*>(const_cast<std::byte*>(src + i));
    const uint64_t word = std::atomic_ref(*from).load(std::memory_order_acquire);
    std::atomic_ref(*reinterpret_cast<uint64_t*>(dst + i)).store(word, std::memory_order_release);
  }
  if (i < bytes) std::memcpy(dst + i, src + i, bytes - i);
}

/// On a stream: everything is sent, then everything is waited for. False if the communicator is aborted: then what is
/// in the mailboxes may belong to a call that came before.
bool exchange(const std::vector<Part>& group) {
  std::unique_lock lock(mutex);
  const auto aborted = [](const Part& part) { return part.communicator->aborted; };
  if (std::any_of(group.begin(), group.end(), aborted)) return false;
  for (const Part& part : group) {
    if (!part.sends) continue;
    auto& box = boxes[{part.communicator->id, part.communicator->rank, part.peer}];
    copy_words(box.emplace_back(part.bytes).data(), part.address, part.bytes);
  }
  changed.notify_all();
  for (const Part& part : group) {
    if (part.sends) continue;
    auto& box = boxes[{part.communicator->id, part.peer, part.communicator->rank}];
    changed.wait(lock, [&] { return !box.empty() || aborted(part); });
    if (aborted(part)) return false;
    if (box.front().size() != part.bytes) std::abort();  // NCCL's behaviour is undefined: a test must not come here
    copy_words(part.address, box.front().data(), part.bytes);
    box.pop_front();
  }
  return true;
}

int add(bool sends, const void* address, size_t bytes, int peer, NcclComm comm, NcclStream stream) {
  auto* communicator = reinterpret_cast<Communicator*>(comm);
  if (open_groups == 0 || peer < 0 || peer >= communicator->world || stream == nullptr) return kInvalidUsage;
  ++messages;
  parts[stream].push_back({sends, peer, static_cast<std::byte*>(const_cast<void*>(address)), bytes, communicator});
  return kNcclSuccess;
}

int finished(void* event, int* answer) {
  std::unique_lock lock(mutex);
  if (const auto driver = static_cast<Event*>(event)->driver) {
    lock.unlock();
    const std::lock_guard waiting(*driver);
    lock.lock();
  }
  const auto& last = static_cast<Event*>(event)->last;
  return *answer = last == nullptr || last->up, 0;
}

int record(void* event, void* stream) {
  auto flag = std::make_shared<Flag>();
  std::unique_lock lock(mutex);
  *static_cast<Event*>(event) = {flag, of(stream).driver()};
  lock.unlock();
  return of(stream).put([flag] { raise(flag); }), 0;
}

int wait(void* stream, void* event) {
  std::unique_lock lock(mutex);
  const std::shared_ptr<Flag> flag = static_cast<Event*>(event)->last;
  lock.unlock();
  if (flag == nullptr) return 0;
  of(stream).put([flag] {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return flag->up; });
  });
  return 0;
}

int reduce(const ReduceArgs* args, DType dtype, ReduceOp op, void* stream) {
  of(stream).put([args = *args, srcs = std::vector(args->srcs, args->srcs + args->n), dtype, op]() mutable {
    std::vector<uint64_t> words(srcs.size());
    for (size_t i = 0; i < srcs.size() && args.count * element_size(dtype) == sizeof(uint64_t); ++i) {
      auto* word = reinterpret_cast<std::byte*>(&words[i]);  // which a peer's kernel may write meanwhile
      copy_words(word, srcs[i], sizeof(uint64_t));
      srcs[i] = word;
    }
    args.srcs = srcs.data();
    reduce_kernel(dtype, op)(args);
  });
  return 0;
}

int copy(void* dst, const void* src, size_t bytes, void* stream) {
  return of(stream).put([=] { std::memcpy(dst, src, bytes); }), 0;
}

void note_blocks(const cuda::PullRanks& args) {
  for (int most = most_blocks; args.blocks > most && !most_blocks.compare_exchange_weak(most, args.blocks);) {
  }
}

int pull(const cuda::PullArgs* args, DType dtype, void* stream) {
  note_blocks(*args);
  if (args->in_place.steps != nullptr) ++in_place;
  of(stream).put([args = *args, run = host_block::find_pull(dtype, args->op)] { host_block::run_blocks(args, run); });
  return 0;
}

int pull_together(const cuda::PullArgs* ranks, int count, DType dtype, void* stream) {
  of(stream).put([all = std::vector(ranks, ranks + count), run = host_block::find_pull(dtype, ranks->op)] {
    std::vector<std::thread> threads;
    for (const cuda::PullArgs& args : all) threads.emplace_back([&args, run] { host_block::run_blocks(args, run); });
    for (std::thread& thread : threads) thread.join();
  });
  return 0;
}

int exchange(const cuda::ExchangeArgs* args, void* stream) {
  note_blocks(*args);
  if (args->call.in_heap != 0) ++in_place;
  of(stream).put([args = *args] { host_block::run_blocks(args, host_block::run_exchange); });
  return 0;
}

int low_latency(const cuda::LowArgs* args, DType dtype, ReduceOp, void* stream) {
  note_blocks(*args);
  ++low_latencies;
  of(stream).put([args = *args, run = host_block::find_low_latency(dtype)] { host_block::run_blocks(args, run); });
  return 0;
}

int copy_now(void* dst, const void* src, size_t bytes, void*) {
  return copy_words(static_cast<std::byte*>(dst), static_cast<const std::byte*>(src), bytes), 0;
}

/// Up to 2 GiB: the host would give more than it has, and end a process that uses it.
int allocate(void** memory, size_t bytes) {
  ++allocations;
  *memory = bytes >> 31 != 0 ? nullptr : std::aligned_alloc(256, (bytes + 255) / 256 * 256);
  return *memory == nullptr;
}

int share(void* memory, RingletCudaShare* share) {
  std::memset(share, 0, sizeof *share);
  std::memcpy(share->bytes, &memory, sizeof memory);
  return 0;
}

int open_share(const RingletCudaShare* share, void** memory) {
  std::memcpy(memory, share->bytes, sizeof *memory);
  const std::lock_guard lock(mutex);
  return opened.insert(*memory), 0;
}

int close_share(void* memory, int) {
  const std::lock_guard lock(mutex);
  const auto found = opened.find(memory);
  return found == opened.end() ? 1 : (opened.erase(found), 0);
}

thread_local int current = 0;
std::atomic<int> architecture{90}, devices{1};

int identity(RingletCudaIdentity* identity) {
  *identity = {{}, current, devices, /*processors=*/8, architecture};  // so that ranks have few threads
  identity->uuid[0] = static_cast<unsigned char>(current);
  return 0;
}

std::atomic<unsigned> touched{0};

/// Of a GPU such a call would make a place for this process on the thread's current device.
template <auto function>
struct Touching;
template <class... Args, int (*function)(Args...)>
struct Touching<function> {
  static int call(Args... args) {
    touched |= 1u << current;
    return function(args...);
  }
};

int release(void* memory) { return Stream::outlive({memory, &std::free}), 0; }
int allocate_mapped(void** memory, size_t bytes) { return *memory = std::calloc(1, bytes), *memory == nullptr; }
int load() { return ++loads, 0; }
int create_stream(void** stream) { return *stream = new Stream, 0; }
int destroy_stream(void* stream) { return delete static_cast<Stream*>(stream), 0; }
int create_event(void** event) { return *event = new Event, 0; }
int destroy_event(void* event) { return delete static_cast<Event*>(event), 0; }

const RingletCudaDevice kDevice = {
    .bytes = sizeof(RingletCudaDevice),
    .serves = "privateuseone",
    .reduce = reduce,
    .most_sources = cuda::kMostSources,
    .copy = copy,
    .pull = pull,
    .pull_together = pull_together,
    .exchange = exchange,
    .low_latency = low_latency,
    .load = Touching<load>::call,
    .upload = Touching<copy_now>::call,
    .download = Touching<copy_now>::call,
    .use = [](int device) { return current = device, 0; },
    .identity = identity,
    .share = Touching<share>::call,
    .open = Touching<open_share>::call,
    .close = Touching<close_share>::call,
    .reach = [](int) { return 0; },
    .allocate = Touching<allocate>::call,
    .release = Touching<release>::call,
    .allocate_mapped = Touching<allocate_mapped>::call,
    .release_mapped = Touching<release>::call,
    .create_stream = Touching<create_stream>::call,
    .destroy_stream = Touching<destroy_stream>::call,
    .create_event = Touching<create_event>::call,
    .destroy_event = Touching<destroy_event>::call,
    .record = Touching<record>::call,
    .wait = Touching<wait>::call,
    .finished = Touching<finished>::call,
    .capturing = [](void*, int* answer) { return *answer = capturing, 0; },
    .explain = [](int) { return "said by the live fake"; },
};

}  // namespace

#define EXPORTED extern "C" __attribute__((visibility("default")))

EXPORTED const RingletCudaDevice* ringlet_cuda_device() { return &kDevice; }
EXPORTED void ringlet_cuda_facts(RingletCudaFacts* facts) {
  *facts = {13000, 13000, /*devices=*/1, /*kernels_run=*/1, "imitation of a GPU", ""};
}

EXPORTED void emulated_gpu_capture(bool now) { capturing = now; }
EXPORTED void emulated_gpu_hold(void* stream, bool held) { of(stream).hold(held); }
EXPORTED void emulated_gpu_launch_queue(int length) { launch_queue = static_cast<size_t>(length); }
EXPORTED void emulated_gpu_wait(void* stream) {
  const auto flag = std::make_shared<Flag>();
  of(stream).put([flag] { raise(flag); });
  std::unique_lock lock(mutex);
  changed.wait(lock, [&] { return flag->up; });
}
EXPORTED int emulated_gpu_opened() {
  const std::lock_guard lock(mutex);
  return static_cast<int>(opened.size());
}
EXPORTED int emulated_gpu_allocations() { return allocations; }
EXPORTED void emulated_gpu_devices(int count) { devices = count; }
EXPORTED void emulated_gpu_architecture(int is) { architecture = is; }
EXPORTED int emulated_gpu_low_latencies() { return low_latencies; }
EXPORTED int emulated_gpu_most_blocks() { return most_blocks.exchange(0); }
EXPORTED int emulated_gpu_max_ctas() { return max_ctas; }
EXPORTED int emulated_gpu_messages() { return messages; }
EXPORTED int emulated_gpu_loads() { return loads; }
EXPORTED int emulated_gpu_in_place() { return in_place; }
EXPORTED unsigned emulated_gpu_touched() { return touched.exchange(0); }

EXPORTED int ncclGetVersion(int* version) { return *version = 22809, kNcclSuccess; }

EXPORTED int ncclGetUniqueId(NcclUniqueId* id) {
  const std::lock_guard lock(mutex);
  std::memset(id, 0, sizeof *id);
  std::memcpy(id->internal, &++ids, sizeof ids);
  return kNcclSuccess;
}

EXPORTED int ncclCommInitRankConfig(NcclComm* comm, int world, NcclUniqueId id, int rank, NcclConfig* config) {
  std::unique_lock lock(mutex);
  max_ctas = config->max_ctas;
  const std::string name(id.internal, sizeof id.internal);
  Communicator* made = communicators.emplace_back(new Communicator{name, rank, world}).get();
  present[made->id].insert(rank);
  std::atomic_ref(*comm).store(reinterpret_cast<NcclComm>(made));
  changed.notify_all();
  if (open_groups > 0) return kNcclSuccess;  // of one thread for several ranks: at the group's end all are there
  changed.wait(lock, [&] { return made->aborted || present[made->id].size() == static_cast<size_t>(world); });
  return made->aborted ? kInvalidUsage : kNcclSuccess;
}

EXPORTED int ncclCommGetAsyncError(NcclComm, int* result) { return *result = kNcclSuccess, kNcclSuccess; }

EXPORTED int ncclCommFinalize(NcclComm) { return kNcclSuccess; }
EXPORTED int ncclCommDestroy(NcclComm) { return kNcclSuccess; }  // streams may still name it, as they may not with NCCL

EXPORTED int ncclCommAbort(NcclComm comm) {
  const std::lock_guard lock(mutex);
  reinterpret_cast<Communicator*>(comm)->aborted = true;
  changed.notify_all();
  return kNcclSuccess;
}

EXPORTED int ncclGroupStart() { return ++open_groups, kNcclSuccess; }

EXPORTED int ncclGroupEnd() {
  if (open_groups == 0) return kInvalidUsage;
  if (--open_groups > 0) return kNcclSuccess;
  for (auto& [stream, group] : parts) of(stream).put([group = std::move(group)] { exchange(group); });
  parts.clear();
  return kNcclSuccess;
}

EXPORTED int ncclSend(const void* from, size_t count, int, int peer, NcclComm comm, NcclStream stream) {
  return add(true, from, count, peer, comm, stream);
}
EXPORTED int ncclRecv(void* to, size_t count, int, int peer, NcclComm comm, NcclStream stream) {
  return add(false, to, count, peer, comm, stream);
}

namespace {

/// One of NCCL's own collectives, which sends `block(q)` to each rank q that wants it. In rank order; not while messages
/// of the same communicator are under way.
struct Native {
  Communicator* own;
  std::byte* input;
  size_t bytes;          // of a block
  bool everyone = true;  // sends; otherwise the root
  int to = -1;           // the only rank that receives
  int root = 0;
  bool apart = false;            // each rank gets a block of its own
  std::vector<std::byte> all{};  // what came, by rank

  bool run() {
    std::vector<Part> group;
    const bool receives = to < 0 || to == own->rank;
    all.resize(static_cast<size_t>(own->world) * bytes);
    for (int q = 0; q < own->world; ++q) {
      const size_t place = static_cast<size_t>(q) * bytes;
      if ((everyone || own->rank == root) && (to < 0 || to == q)) {
        group.push_back({true, q, input + (apart ? place : 0), bytes, own});
      }
      if (receives && (everyone || q == root)) group.push_back({false, q, all.data() + place, bytes, own});
    }
    return exchange(group);
  }
  void combine(std::byte* output, DType dtype, ReduceOp op) {
    if (to >= 0 && to != own->rank) return;
    std::vector<const std::byte*> srcs;
    for (int q = 0; q < own->world; ++q) srcs.push_back(all.data() + static_cast<size_t>(q) * bytes);
    std::vector<std::byte> result(bytes);
    ReduceArgs args{result.data(), nullptr, srcs.data(), own->world, bytes / element_size(dtype)};
    args.divisor = op == ReduceOp::avg ? own->world : 1;
    reduce_kernel(dtype, op)(args);
    copy_words(output, result.data(), bytes);
  }
};

constexpr DType kTypes[] = {DType::int8,  DType::uint8,   DType::int32,   DType::int32,   DType::int64,
                            DType::int64, DType::float16, DType::float32, DType::float64, DType::bfloat16};
constexpr ReduceOp kOps[] = {ReduceOp::sum, ReduceOp::product, ReduceOp::max, ReduceOp::min, ReduceOp::avg};

std::atomic<int> natives{0};

int enqueue(Native native, void* output, NcclStream stream, int type, int op) {
  if (stream == nullptr) return kInvalidUsage;
  ++natives;
  of(stream).put([native = std::move(native), to = static_cast<std::byte*>(output), type, op]() mutable {
    if (!native.run()) return;
    if (op >= 0) {
      native.combine(to, kTypes[type], kOps[op]);
    } else if (native.everyone) {
      std::memcpy(to, native.all.data(), native.all.size());
    } else {
      std::memcpy(to, native.all.data() + static_cast<size_t>(native.root) * native.bytes, native.bytes);
    }
  });
  return kNcclSuccess;
}

Native native(const void* from, size_t bytes, NcclComm comm) {
  return {reinterpret_cast<Communicator*>(comm), static_cast<std::byte*>(const_cast<void*>(from)), bytes};
}
size_t bytes_of(size_t count, int type) { return count * element_size(kTypes[type]); }

}  // namespace

EXPORTED int ncclAllReduce(const void* from, void* to, size_t count, int type, int op, NcclComm comm,
                           NcclStream stream) {
  return enqueue(native(from, bytes_of(count, type), comm), to, stream, type, op);
}
EXPORTED int ncclReduceScatter(const void* from, void* to, size_t count, int type, int op, NcclComm comm,
                               NcclStream stream) {
  Native made = native(from, bytes_of(count, type), comm);
  made.apart = true;
  return enqueue(std::move(made), to, stream, type, op);
}
EXPORTED int ncclReduce(const void* from, void* to, size_t count, int type, int op, int root, NcclComm comm,
                        NcclStream stream) {
  Native made = native(from, bytes_of(count, type), comm);
  made.to = root;
  return enqueue(std::move(made), to, stream, type, op);
}
EXPORTED int ncclAllGather(const void* from, void* to, size_t count, int type, NcclComm comm, NcclStream stream) {
  return enqueue(native(from, bytes_of(count, type), comm), to, stream, type, -1);
}
EXPORTED int ncclBroadcast(const void* from, void* to, size_t count, int type, int root, NcclComm comm,
                           NcclStream stream) {
  Native made = native(from, bytes_of(count, type), comm);
  made.everyone = false;
  made.root = root;
  return enqueue(std::move(made), to, stream, type, -1);
}
EXPORTED int emulated_gpu_natives() { return natives; }
EXPORTED const char* ncclGetErrorString(int) { return "an error of the live fake"; }
EXPORTED const char* ncclGetLastError(NcclComm) { return ""; }
