// Random point-to-point traffic between ranks that are threads: every message arrives, whole, where its tag says.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <latch>
#include <new>
#include <random>
#include <thread>

#include "check.h"
#include "engine/health.h"
#include "ranks.h"
#include "uneven_blocks.h"

using namespace ringlet;

/// More than this cannot be allocated.
static std::atomic<size_t> most_allocated{SIZE_MAX};

[[gnu::noinline]] void* operator new(size_t bytes) {
  void* const memory = bytes > most_allocated.load() ? nullptr : std::malloc(bytes);
  return memory != nullptr ? memory : throw std::bad_alloc();
}
[[gnu::noinline]] void* operator new(size_t bytes, const std::nothrow_t&) noexcept { return std::malloc(bytes); }
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, size_t) noexcept { std::free(memory); }

namespace {

constexpr int kTags = 3;

/// One message of the traffic that all ranks know.
struct Planned {
  int from, to;
  int64_t tag;
  size_t count;
  int number;
  bool any_source;  // of the receive
};

std::vector<Planned> traffic(int world, int messages, uint32_t seed) {
  std::mt19937 random(seed);
  const size_t counts[] = {0, 1, 1000, 20'000, 40'000, 150'000};
  std::vector<Planned> all;
  for (int i = 0; i < messages; ++i) {
    const int from = static_cast<int>(random() % world);
    const int to = (from + 1 + static_cast<int>(random() % (world - 1))) % world;
    all.push_back({from, to, static_cast<int64_t>(random() % kTags), counts[random() % 6], i, false});
  }
  // Receives from anyone, with a tag of their own and one size.
  for (int i = 0; i < messages / 4; ++i) {
    const int from = static_cast<int>(random() % world);
    all.push_back({from, (from + 1) % world, kTags, 500, messages + i, true});
  }
  return all;
}

Message message(int peer, bool sending, std::vector<int>& data, int64_t tag) {
  return {peer, sending, DType::int32, data.size(), reinterpret_cast<std::byte*>(data.data()), {}, tag};
}

Message message_of(const Planned& planned, bool sending, std::vector<int>& data) {
  const int peer = sending ? planned.to : planned.any_source ? kAnySource : planned.from;
  return message(peer, sending, data, planned.tag);
}

struct Receive {
  const Planned* planned;
  std::vector<int> data;
  std::shared_ptr<Messenger::Request> request{};
};

void play(Communicator& group, const std::vector<Planned>& all, uint32_t seed, bool dropped) {
  std::mt19937 random(seed + static_cast<uint32_t>(group.rank()));
  std::vector<Receive> receives;
  std::vector<std::vector<int>> sent;
  std::vector<std::shared_ptr<Work>> sends;
  for (const Planned& planned : all) {
    if (planned.to == group.rank()) receives.push_back({&planned, std::vector<int>(planned.count, -1)});
  }
  // Receives of one source and tag stay in order; between tags the order is any.
  std::stable_sort(receives.begin(), receives.end(),
                   [&](const Receive& a, const Receive& b) { return a.planned->tag > b.planned->tag; });
  size_t posted = 0;
  const auto post_some = [&](size_t some) {
    for (; some > 0 && posted < receives.size(); --some, ++posted) {
      Receive& receive = receives[posted];
      receive.request = group.start(message_of(*receive.planned, false, receive.data), nullptr);
    }
  };
  for (const Planned& planned : all) {
    if (planned.from != group.rank()) continue;
    sent.emplace_back(planned.count, planned.number);
    sends.push_back(group.start(message_of(planned, true, sent.back()), nullptr));
    post_some(random() % 3);
  }
  post_some(receives.size());
  if (dropped) {  // the messenger's own thread moves them
    group.run({.collective = Collective::barrier});
  }
  for (Receive& receive : receives) {
    receive.request->wait(std::chrono::milliseconds::max());
    if (receive.planned->any_source) {
      const auto same = [&](const Planned& p) { return p.any_source && p.number == receive.data[0]; };
      const auto whose = std::find_if(all.begin(), all.end(), same);
      CHECK(whose != all.end() && whose->to == group.rank() && whose->from == receive.request->peer());
    } else {
      CHECK(receive.data == std::vector<int>(receive.planned->count, receive.planned->number));
      CHECK_EQ(receive.request->peer(), receive.planned->from);
    }
  }
  for (const auto& send : sends) send->wait(std::chrono::milliseconds::max());
}

void all_to_all_of_uneven_blocks(Communicator& group) {
  uneven_blocks::UnevenRank rank({Collective::all_to_all, 30'000}, group.rank(), group.world());
  group.run({.collective = Collective::all_to_all, .dtype = DType::int32, .blocks = &rank.blocks});
  CHECK(rank.out == rank.wanted);
}

/// Several threads of each rank wait at once, for so long that all of them sleep; each has a message of its own tag.
void waits_of_many_threads(Communicator& group) {
  constexpr int kWaiting = 4;
  const int from = (group.rank() + group.world() - 1) % group.world(), to = (group.rank() + 1) % group.world();
  const auto number = [](int rank, int64_t tag) { return 100 * rank + static_cast<int>(tag); };
  std::vector<std::vector<int>> received(kWaiting, std::vector<int>(50'000, -1));
  std::vector<std::thread> threads;
  for (int64_t tag = 0; tag < kWaiting; ++tag) {
    const auto request = group.start(message(from, false, received[tag], tag), nullptr);
    threads.emplace_back([request] { request->wait(std::chrono::milliseconds::max()); });
  }
  for (int64_t tag = kWaiting - 1; tag >= 0; --tag) {
    std::this_thread::sleep_for(std::chrono::milliseconds(30));  // longer than waits yield
    std::vector<int> sent(received[tag].size(), number(group.rank(), tag));
    group.start(message(to, true, sent, tag), nullptr)->wait(std::chrono::milliseconds::max());
  }
  for (std::thread& thread : threads) thread.join();
  for (int64_t tag = 0; tag < kWaiting; ++tag) {
    CHECK(received[tag] == std::vector<int>(received[tag].size(), number(from, tag)));
  }
}

/// Rank 0 has no memory for a message that it did not expect, while another that it sends is half-way. That must not be
/// completed by the bytes of a later one. Messages are larger than what sockets hold.
TEST_EACH(an_allocation_that_fails_ends_the_group, Between between, Between::one_memory, Between::stages,
          Between::tcp) {
  std::latch failed(1);
  run_well(3, between, [&](Communicator& group) {
    const int rank = group.rank();
    std::vector<int> data(size_t{1} << 22, rank), later(data.size(), 77), few(10);
    group.run({.collective = Collective::barrier});
    if (rank == 0) {
      most_allocated = size_t{1} << 20;
      const auto sent = group.start(message(2, true, data, 0), nullptr);
      const std::string first = CHECK_THROWS(ResourceError, group.run(message(1, false, few, 6)));
      CHECK(first.find("rank 0 of 3 in its messages: std::bad_alloc") != std::string::npos);
      CHECK_THROWS(Error, group.start(message(2, true, later, 0), nullptr)->wait(std::chrono::seconds(10)));
      CHECK_THROWS(Error, sent->wait(std::chrono::seconds(10)));
      most_allocated = SIZE_MAX;
      failed.count_down();
    } else if (rank == 1) {
      CHECK_THROWS(Error, group.run(message(0, true, data, 5)));
    } else {
      failed.wait();
      CHECK_THROWS(Error, group.run(message(0, false, data, 0)));
      CHECK_EQ(std::count(data.begin(), data.end(), 77), 0);
    }
  });
}

/// No peer reports.
class Silent final : public Health::Carrier {
  bool send(const Health::Report&) noexcept override { return true; }
  void poll(Health::Look) override {}
};

/// Rank 1 writes a frame. What rank 0 raises that receives `count` bytes with that tag.
std::string end_of_receive(const FrameHeader& header, size_t count, int64_t tag) {
  std::string told;
  const auto body = [&](int rank) {
    std::shared_ptr<Transport> transport = join_threads("told", rank, 2, Deadline::after(std::chrono::seconds(60)));
    Mesh mesh({.rank = rank, .world = 2, .hosts = {0, 0}, .local = std::move(transport)});
    if (rank == 1) {
      const iovec all{const_cast<FrameHeader*>(&header), sizeof header};
      CHECK_EQ(mesh.find(0, ConnectionKind::messages)->write(&all, 1), sizeof header);
      return;
    }
    Silent silent;
    CallLog calls;
    Health health(0, 2, calls, silent, false);
    P2p p2p(mesh, health, 0);
    const auto messenger = std::make_shared<Messenger>(p2p);
    std::vector<std::byte> data(count);
    const Message message{1, false, DType::uint8, count, data.data(), std::chrono::seconds(60), tag};
    try {
      messenger->post(message, nullptr, true)->wait(std::chrono::seconds(60));
    } catch (const Error& error) {
      told = error.what();
    }
  };
  std::thread other([&] { body(1); });
  body(0);
  other.join();
  return told;
}

TEST(an_address_that_this_rank_cannot_read_is_no_message) {
  FrameHeader header;
  header.kind = FrameKind::message;
  header.signature = static_cast<uint64_t>(DType::uint8);
  header.count = 5;
  header.segment = 1;
  CHECK(end_of_receive(header, 5, 0).find("rank 1 sent an address in place of the message") != std::string::npos);
}

TEST(a_peer_does_not_decide_how_much_memory_is_taken) {
  FrameHeader header;
  header.kind = FrameKind::message;
  header.signature = static_cast<uint64_t>(DType::uint8);
  header.bytes = header.count = uint64_t{1} << 50;
  header.detail = 7;
  CHECK(end_of_receive(header, 1, 3)
            .find("rank 1 sends a message of 1125899906842624 bytes for which this rank has posted no receive") !=
        std::string::npos);
  CHECK(!Envelope::is_possible(kDTypes, 1) &&
        !Envelope::is_possible(static_cast<uint64_t>(DType::int64), UINT64_MAX / 8));
}

TEST_EACH(messages_arrive, int world, 2, 3, 5) {
  for (const Between between : {Between::one_memory, Between::stages, Between::tcp}) {
    for (uint32_t seed = 1; seed <= (kSanitized ? 2 : 4); ++seed) {
      const std::vector<Planned> all = traffic(world, 60, seed);
      run_well(world, between, [&](Communicator& group) { play(group, all, seed, seed % 2 == 0); });
    }
    for (const auto body : {all_to_all_of_uneven_blocks, waits_of_many_threads}) {
      run_well(world, between, body);
    }
  }
}

}  // namespace
