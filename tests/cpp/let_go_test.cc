// A rank gives up and its tensors are its caller's again, while a peer is still reading them where they lie: what the
// peer has read is not passed for what it was sent.
#include <signal.h>
#include <sys/mman.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <cstring>

#include "check.h"
#include "few_algorithms.h"
#include "ranks.h"

using namespace ringlet;
using namespace std::chrono_literals;

namespace {

enum class End { abort, poison, timeout };

constexpr size_t kBlock = size_t{6} << 20;  // more than one segment
constexpr size_t kPage = 4096;

// Rank 1 reads on past the trap only when rank 0 has let go.
std::atomic<std::byte*> trap{nullptr};
std::atomic<bool> reading{false}, let_go{false};

void wait_in_trap(int, siginfo_t* fault, void*) {
  std::byte* page = trap.load();
  const auto* at = static_cast<const std::byte*>(fault->si_addr);
  if (page == nullptr || at < page || at >= page + kPage) {
    ::signal(SIGSEGV, SIG_DFL);  // and again, for good
    return;
  }
  reading = true;
  const timespec glance{0, 100'000};
  for (int i = 0; i < 300'000 && !let_go; ++i) ::nanosleep(&glance, nullptr);
  ::mprotect(page, kPage, PROT_READ | PROT_WRITE);
}

/// A tensor with pages of its own.
class Pages {
 public:
  explicit Pages(size_t bytes, int value) : bytes_(std::max(bytes, kPage)) {
    data_ =
        static_cast<std::byte*>(::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    std::memset(data_, value, bytes_);
  }
  ~Pages() { ::munmap(data_, bytes_); }
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;

  std::byte* data() { return data_; }
  /// As its owner may do who has it back: it reads as zeros then.
  void give_back() { ::madvise(data_, bytes_, MADV_DONTNEED); }
  void set_trap(size_t page) {
    reading = let_go = false;
    trap = data_ + page * kPage;
    ::mprotect(trap, kPage, PROT_NONE);
  }
  bool all(size_t begin, size_t end, int value) const {
    // Each byte like the one before: at once, since there are many.
    return begin == end || (data_[begin] == static_cast<std::byte>(value) &&
                            std::memcmp(data_ + begin, data_ + begin + 1, end - begin - 1) == 0);
  }

 private:
  size_t bytes_;
  std::byte* data_;
};

std::string ended(const std::function<void()>& act) {
  try {
    act();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

void give_up(Communicator& group, End end) {
  if (end == End::abort) group.abort("rank 0 has had enough");
  if (end == End::poison) group.health().poison(Timeout("rank 0 waited for something else"));
}

void send(Communicator& group, Pages& tensor, End end, std::chrono::milliseconds limit, const std::atomic<bool>& over) {
  const auto sent = group.start(Message{1, true, DType::uint8, kBlock, tensor.data(), limit}, nullptr);
  while (!reading && !over) std::this_thread::yield();
  give_up(group, end);
  CHECK(!ended([&] { sent->wait(60s); }).empty());
  tensor.give_back();
  let_go = true;
}

/// Returns false if rank 0 gave up before rank 1 was reading: then `limit` was too short for this machine.
bool message(End end, std::chrono::milliseconds limit) {
  Pages given(kBlock, 1), taken(kBlock, 0);
  taken.set_trap(kBlock / kPage - 16);
  std::string end_of_recv;
  std::atomic<bool> over{false};
  run_ranks(2, Between::kept_memory, [&](Communicator& group) {
    if (group.rank() == 0) return send(group, given, end, limit, over);
    end_of_recv = ended([&] { group.run(Message{0, false, DType::uint8, kBlock, taken.data(), 60s}); });
    over = true;
  });
  if (!reading) return false;
  const std::string told = end == End::abort
                               ? "rank 0 left the group: it finished early, or raised an error: look at its output"
                           : end == End::poison ? "rank 0 reported: rank 0 waited for something else"
                                                : "rank 0 reported: rank 0 of 2 in send to rank 1 (";
  const std::string text =
      "rank 1 of 2 in recv from rank 0 (6291456 elements of uint8), 5767168 of 6291456 bytes done" +
      std::string(", reading the tensor of rank 0, which may have changed meanwhile: ") + told;
  CHECK_EQ(end_of_recv.substr(0, text.size()), text);
  return true;
}

void message(End end) {
  if (end != End::timeout) {
    CHECK(message(end, 60s));
  } else {
    CHECK(message(end, 200ms) || message(end, 2s) || message(end, 8s));
  }
}

/// What rank 1's output must hold, byte by byte, where rank q gives bytes of 1 + q.
bool right(const Call& call, const Pages& output, size_t bytes) {
  if (is_reduction(call.collective)) return output.all(0, bytes, 3);
  if (bytes == call.count) return output.all(0, bytes, 1 + call.root);
  return output.all(0, call.count, 1) && output.all(call.count, bytes, 2);
}

/// Whether rank 1 was told; if not, its output must be what it would be had rank 0 waited for it.
bool collective(Call call, End end, bool first_half) {
  call.count = is_divided(call.collective) ? 2 * kBlock : kBlock;
  const size_t outputs = output_elements(call, 1, 2);
  if (outputs == 0) return false;
  Pages inputs[] = {Pages(2 * kBlock, 1), Pages(2 * kBlock, 2)}, results[] = {Pages(2 * kBlock, 0), Pages(outputs, 0)};
  results[1].set_trap(outputs / (first_half ? 2 : 1) / kPage - 16);
  std::string end_of_call;
  run_ranks(2, Between::kept_memory, [&](Communicator& group) {
    const int rank = group.rank();
    Call own = call;
    own.timeout = rank == 0 && end == End::timeout ? 100ms : 60'000ms;
    own.input = input_elements(call, rank, 2) == 0 ? nullptr : inputs[rank].data();
    own.output = output_elements(call, rank, 2) == 0 ? nullptr : results[rank].data();
    if (rank == 1) {
      end_of_call = ended([&] { group.run(own); });
      return;
    }
    std::atomic<bool> over{false};
    std::thread other([&] {
      while (!reading && !over) std::this_thread::yield();
      give_up(group, end);
    });
    ended([&] { group.run(own); });
    for (Pages* each : {&inputs[0], &results[0]}) each->give_back();
    let_go = over = true;
    other.join();
  });
  const bool well = end_of_call.empty();
  const bool sound = !well || right(call, results[1], outputs);
  CHECK(sound);
  if (!sound) std::fprintf(stderr, "  %s %s, end %d\n", name(call.collective), call.algorithm->name, int(end));
  return end_of_call.find("reading the tensor of rank 0, which may have changed meanwhile") != std::string::npos;
}

void collectives(End end) {
  int told = 0;
  for (const Algorithm& algorithm : algorithms()) {
    if (algorithm.collective == Collective::barrier) continue;
    if (!is_tried(algorithm, 6)) continue;  // they read alike
    for (int root = 0; root < (has_root(algorithm.collective) ? 2 : 1); ++root) {
      Call call{.collective = algorithm.collective, .algorithm = &algorithm, .root = root};
      told += collective(call, end, false);
      if (end != End::timeout) told += collective(call, end, true);  // a timeout waits for as long in every call
    }
  }
  CHECK(told >= (kSanitized ? 3 : 10));
}

TEST_EACH(what_was_read_late_is_not_passed_on, End end, End::abort, End::poison, End::timeout) {
  struct sigaction action{};
  action.sa_sigaction = wait_in_trap;
  action.sa_flags = SA_SIGINFO;
  ::sigaction(SIGSEGV, &action, nullptr);
  message(end);
  if (end != End::poison) collectives(end);
}

}  // namespace
