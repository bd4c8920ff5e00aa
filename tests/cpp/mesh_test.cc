// Pipes over TCP: made from either end or both, bytes in order, ends, sleeping, other versions and other groups.
#include "transport/mesh.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <atomic>
#include <cstdlib>
#include <latch>
#include <thread>

#include "check.h"
#include "mesh_group.h"
#include "transport/address.h"
#include "transport/congestion.h"
#include "transport/in_process.h"
#include "transport/ring_pipe.h"
#include "transport/socket.h"

using namespace ringlet;
using namespace std::chrono_literals;

namespace {

TEST(digests_match_the_reference) {
  Token key;
  std::array<std::byte, 15> data;
  for (int i = 0; i < 16; ++i) key[i] = static_cast<uint8_t>(i);
  for (int i = 0; i < 15; ++i) data[i] = static_cast<std::byte>(i);
  // From the authors' vectors for 128 bits, and from OpenSSL's implementation: openssl mac -macopt size:16 SIPHASH.
  CHECK_EQ(hex(siphash(key, {})), "a3817f04ba25a8e66df67214c7550293");
  CHECK_EQ(hex(siphash(key, std::span(data).first(1))), "da87c1d86b99af44347659119b22fc45");
  CHECK_EQ(hex(siphash(key, std::span(data).first(8))), "3b62a9ba6258f5610f83e264f31497b4");
  CHECK_EQ(hex(siphash(key, data)), "5493e99933b0a8117e08ec0f97cfc3d9");
  const Token a = random_token(), b = random_token();
  CHECK(same(a, a));
  CHECK(!same(a, b));
}

TEST(addresses_are_read_back_and_checked) {
  PeerAddress address{.host = 5, .listener = 7, .port = 4000, .addresses = {}};
  for (const char* text : {"127.0.0.1", "10.1.2.3", "::1", "fd00::2"})
    address.addresses.emplace_back(std::string(text));
  const PeerAddress copy = PeerAddress::unpack(address.pack());
  CHECK_EQ(copy.pack(), address.pack());
  CHECK_EQ(copy.reachable_from(5).front().text(), "127.0.0.1");
  CHECK_EQ(copy.reachable_from(5)[1].text(), "::1");
  CHECK_EQ(copy.reachable_from(6).size(), size_t{2});
  for (const std::string& text :
       {std::string(), std::string("junk"), std::string("5 7 4000"), std::string("5 7 70000 10.1.2.3"),
        std::string("5 7 4000 10.1.2"), std::string("5 7 4000 10.1.2.3 x"), std::string("5 7 0 10.1.2.3"),
        std::string(5000, '1')}) {
    CHECK_THROWS(InvalidUsage, PeerAddress::unpack(text));
  }
}

/// A link-local address is tried through each interface of this host that has one, too; loopback only within a host.
TEST(link_local_addresses_are_tried_through_interfaces) {
  PeerAddress address{.host = 5, .listener = 7, .port = 4000, .addresses = {Address(std::string("fe80::1"))}};
  CHECK(PeerAddress::unpack(address.pack()).addresses == address.addresses);
  for (const Address& each : address.reachable_from(6)) CHECK(each.text().starts_with("fe80::1%"));
  CHECK_HAS(address.why_unreachable(), "only IPv6 link-local addresses");
  address.addresses = {Address(std::string("127.0.0.1")), Address(std::string("169.254.1.2"))};
  CHECK_EQ(address.reachable_from(6).front().text(), "169.254.1.2");
  CHECK_EQ(address.reachable_from(6).size(), size_t{1});
  address.addresses.resize(1, address.addresses[0]);
  CHECK(address.reachable_from(6).empty());
  CHECK_HAS(address.why_unreachable(), "only loopback addresses");
}

TEST(addresses_are_those_of_the_interface) {
  const std::vector<Address> loopback = own_addresses("lo");
  CHECK(!loopback.empty());
  for (const Address& each : loopback) CHECK(each.is_loopback());
  CHECK_HAS(CHECK_THROWS(InvalidUsage, own_addresses("no-such0")), "no-such0", "lo (127.0.0.1)");
  CHECK(own_addresses("").back().is_loopback());
}

/// Every pair, every kind, both directions, one thread a rank.
void exchange_all_pairs(Group group, int connections) {
  const int world = group.world();
  constexpr size_t kBytes = kSanitized ? 700'001 : 3'000'001;
  group.run([&](Mesh& mesh) {
    std::vector<Exchange> exchanges;
    for (int peer = 0; peer < world; ++peer) {
      if (peer == mesh.rank()) continue;
      exchanges.emplace_back(mesh, peer, ConnectionKind::collectives, kBytes);
      exchanges.emplace_back(mesh, peer, ConnectionKind::messages, kBytes / 2);
    }
    exchange(mesh, exchanges);
    CHECK_EQ(mesh.connections(), connections);
  });
}

bool has_v6() {
  const Socket probe(::socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in6 own{};
  own.sin6_family = AF_INET6;
  own.sin6_addr = in6addr_loopback;
  return probe.valid() && ::bind(probe.get(), reinterpret_cast<const sockaddr*>(&own), sizeof own) == 0;
}

TEST(all_pairs_exchange) {
  exchange_all_pairs(Group(2), 2);
  exchange_all_pairs(Group(4), 6);
  const auto only_v6 = [](int, PeerAddress& address) { address.addresses = {Address(std::string("::1"))}; };
  if (has_v6()) exchange_all_pairs(Group(2, only_v6), 2);
  exchange_all_pairs(Group(Hosts{0, 0}), 0);
  exchange_all_pairs(Group(Hosts{5, 5, 5, 5, 5}), 0);
  exchange_all_pairs(Group(Hosts{0, 1, 0, 1}), 4);
}

TEST(both_ends_connect_at_once) {
  for (int i = 0; i < 200; ++i) {
    Group group(2);
    group.run([&](Mesh& mesh) {
      std::vector<Exchange> exchanges;
      exchanges.emplace_back(mesh, 1 - mesh.rank(), ConnectionKind::collectives, 1000);
      exchange(mesh, exchanges);
      CHECK_EQ(mesh.connections(), 1);
    });
  }
}

TEST_EACH(a_closed_group_is_seen_and_everything_arrived, const Hosts& hosts, {0, 1}, {0, 0}) {
  Group group(hosts);
  group.run([&](Mesh& mesh) {
    Pipe* pipe = wait_for(mesh, 1 - mesh.rank(), ConnectionKind::collectives);
    if (mesh.rank() == 0) {
      write_all(mesh, *pipe, pattern(100'000, 0, 1));
      mesh.close(Deadline::after(10s));
      return;
    }
    CHECK(read_all(mesh, *pipe, 100'000) == pattern(100'000, 0, 1));
    sleep_until(mesh, *pipe, [&] { return pipe->ended(); });
    CHECK_EQ(pipe->why_ended(), "closed the connection");
  });
}

/// A rank that waits for others, too, sleeps meanwhile.
TEST_EACH(a_pipe_that_has_ended_wakes_nobody, const Hosts& hosts, {0, 1}, {0, 0}) {
  Group group(hosts);
  group.run([&](Mesh& mesh) {
    Pipe* const pipe = wait_for(mesh, 1 - mesh.rank(), ConnectionKind::messages);
    if (mesh.rank() == 0) return mesh.close(Deadline::after(10s));
    sleep_until(mesh, *pipe, [&] { return pipe->ended(); });
    const Mesh::Watch watch{pipe, true, false};
    bool slept = false;
    for (int sleep = 0; sleep < 20 && !slept; ++sleep) {  // wakeups may be left over from before
      const auto began = std::chrono::steady_clock::now();
      mesh.sleep(ConnectionKind::messages, {&watch, 1}, 50'000'000);
      slept = std::chrono::steady_clock::now() - began > 45ms;
    }
    CHECK(slept);
  });
}

/// The end of one connection may arrive before what was written to another.
TEST_EACH(a_message_outlives_the_end_of_another_pipe, const Hosts& hosts, {0, 1}, {0, 0}) {
  Group group(hosts);
  std::latch written(1), seen(1);
  group.run([&](Mesh& mesh) {
    const int peer = 1 - mesh.rank();
    Pipe* const collectives = wait_for(mesh, peer, ConnectionKind::collectives);
    if (mesh.rank() == 0) {
      Pipe* const out = wait_for(mesh, peer, ConnectionKind::messages);
      write_all(mesh, *out, pattern(1000, 0, 1));
      collectives->finish();
      written.count_down();
      seen.wait();
      mesh.close(Deadline::after(10s));
      return;
    }
    Pipe* const in = wait_for(mesh, peer, ConnectionKind::messages);
    written.wait();
    sleep_until(mesh, *collectives, [&] { return collectives->ended(); });
    CHECK(mesh.gone(peer, false) && !mesh.gone(peer, true));
    CHECK(read_all(mesh, *in, 1000) == pattern(1000, 0, 1));
    seen.count_down();
    sleep_until(mesh, *in, [&] { return in->ended(); });
    CHECK(mesh.gone(peer, true));
  });
}

/// Who ends waits for peers to have what it wrote, but not for peers that have ended: together with it, or before.
TEST_EACH(ends_wait_for_nobody_who_has_ended, const Hosts& hosts, {0, 1}, {0, 0}) {
  for (const bool together : {true, false}) {
    Group group(hosts);
    std::latch first(together ? 2 : 1);
    group.run([&](Mesh& mesh) {
      Pipe* pipe = wait_for(mesh, 1 - mesh.rank(), ConnectionKind::collectives);
      const bool before = !together && mesh.rank() == 1;
      if (!together && !before) first.wait();
      if (!before) write_all(mesh, *pipe, pattern(1000, mesh.rank(), 1 - mesh.rank()));
      if (together) first.arrive_and_wait();
      const Deadline soon = Deadline::after(10s);
      mesh.close(Deadline::after(20s));
      CHECK(!soon.passed());
      if (before) first.count_down();
    });
  }
}

/// One rank cannot connect to the other, which can.
TEST(one_end_that_can_connect_is_enough) {
  for (const ConnectionKind which : kConnectionKinds) {
    for (const int blocked : {0, 1}) {
      Group group(2, [&](int rank, PeerAddress& address) {
        if (rank == blocked) return;
        address.host ^= 1;  // between hosts
        address.addresses = {Address(std::string("192.0.2.1"))};
      });
      group.run([&](Mesh& mesh) {
        wait_for(mesh, 1 - mesh.rank(), which);
        CHECK_EQ(mesh.connections(), 1);
      });
    }
  }
}

/// Whatever the other addresses say, of which none is tried again: that takes 10 s.
TEST(where_loopback_refuses_nobody_is_there) {
  Group group(2, [](int, PeerAddress& address) {
    address.port = 1;
    address.addresses = {Address(std::string("127.0.0.1")), Address(std::string("192.0.2.1"))};
  });
  const Deadline before = Deadline::after(9s);
  CHECK_HAS(CHECK_THROWS(PeerLost, wait_for(group.rank(0), 1, ConnectionKind::collectives)),
            "rank 0 cannot reach rank 1", "127.0.0.1:1: Connection refused", "192.0.2.1:1");
  CHECK(!before.passed());
}

TEST(nothing_comes_from_who_is_gone) {
  Group group(2);
  group.run([&](Mesh& mesh) {
    if (mesh.rank() == 1) {
      write_all(mesh, *wait_for(mesh, 0, ConnectionKind::messages), pattern(1000, 1, 0));
      mesh.close(Deadline::after(10s));
      return;
    }
    Pipe* pipe = wait_for(mesh, 1, ConnectionKind::messages);  // what was sent before is there, however late one asks
    CHECK(read_all(mesh, *pipe, 1000) == pattern(1000, 1, 0));
    sleep_until(mesh, *pipe, [&] { return pipe->ended(); });
    CHECK_THROWS(PeerLost, wait_for(mesh, 1, ConnectionKind::collectives));
  });
  Group silent(2);
  std::atomic<bool> closed{false};
  silent.run([&](Mesh& mesh) {
    if (mesh.rank() == 1) {
      mesh.close(Deadline::after(0ms));
      closed = true;
      return;
    }
    while (!closed) std::this_thread::yield();  // a rank that is still there takes a connection, which then ends
    CHECK_THROWS(PeerLost, wait_for(mesh, 1, ConnectionKind::messages));
  });
}

/// A rank that leaves does not wait until a busy peer of its host has read it.
TEST(what_lies_in_a_ring_outlives_the_end) {
  Group group(Hosts{0, 0});
  std::latch left(1);
  group.run([&](Mesh& mesh) {
    Pipe* const pipe = wait_for(mesh, 1 - mesh.rank(), ConnectionKind::messages);
    if (mesh.rank() == 0) {
      write_all(mesh, *pipe, pattern(1000, 0, 1));
      const Deadline patience = Deadline::after(10s);
      mesh.close(patience);
      left.count_down();
      CHECK(!patience.passed());
      return;
    }
    left.wait();
    CHECK(read_all(mesh, *pipe, 1000) == pattern(1000, 0, 1));
    CHECK(pipe->ended());
  });
}

TEST(collectives_of_one_host_need_no_rings) {
  ThreadStore store;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&store, rank] {
      const Deadline deadline = Deadline::after(60s);
      const auto transport = connect_shared_memory(store, "plain", rank, 2, deadline);
      CHECK_EQ(transport->wakeup(rank, ConnectionKind::collectives), -1);
      CHECK_EQ(transport->wakeup(1 - rank, ConnectionKind::collectives), -1);
      CHECK(transport->alive(1 - rank));
      CHECK(transport->wakeup(rank, ConnectionKind::messages) >= 0);
      CHECK_THROWS(InvalidUsage, Mesh({.rank = rank,
                                       .world = 3,
                                       .key = random_token(),
                                       .addresses = std::vector<std::string>(3, Mesh::address()),
                                       .hosts = {0, 0, 1},
                                       .local = connect_shared_memory(store, "again", rank, 2, deadline)}));
    });
  }
  for (std::thread& thread : threads) thread.join();
}

/// A peer may write any numbers into its memory.
TEST(a_ring_stays_within_itself) {
  const Deadline deadline = Deadline::after(60s);
  std::unique_ptr<Transport> ranks[2];
  std::thread other([&] { ranks[1] = join_threads("ring", 1, 2, deadline); });
  ranks[0] = join_threads("ring", 0, 2, deadline);
  other.join();
  RingPipe pipe(*ranks[0], 1, ConnectionKind::messages, SIZE_MAX);
  RingCounters& theirs = ranks[1]->channel(0).rings[static_cast<size_t>(ConnectionKind::messages)];
  Bytes data(1 << 20, std::byte{7});
  const iovec piece{data.data(), data.size()};
  theirs.sent = 1;
  for (const uint32_t length : {0u, 1u << 20, RingCounters::kTimed, ~0u}) {
    theirs.lengths[0] = length;
    CHECK(!pipe.peek(data.data(), 1));
    CHECK_EQ(pipe.read(&piece, 1), size_t{0});
  }
  theirs.received = 77;
  CHECK_EQ(pipe.write(&piece, 1), size_t{0});
}

TEST(a_way_open_in_one_direction_is_found) {
  // Both connect, and the connection of rank 1, which would be kept, comes to nothing.
  Group group(2, [](int rank, PeerAddress& address) { address.port = rank == 0 ? 1 : address.port; });
  group.run([&](Mesh& mesh) {
    Pipe* pipe = nullptr;
    while (pipe == nullptr) {
      try {
        pipe = wait_for(mesh, 1 - mesh.rank(), ConnectionKind::collectives);
      } catch (const PeerLost&) {
        CHECK_EQ(mesh.rank(), 1);  // before rank 0 had come
      }
    }
    if (mesh.rank() == 1) write_all(mesh, *pipe, pattern(1000, 1, 0));
    if (mesh.rank() == 0) CHECK(read_all(mesh, *pipe, 1000) == pattern(1000, 1, 0));
  });
}

TEST(setups_that_contradict_themselves_are_refused) {
  const auto setup = [](int rank, int world, Hosts hosts) {
    std::vector<std::string> addresses(hosts.size(), Mesh::address());
    return Mesh::Setup{.rank = rank, .world = world, .key = random_token(), .addresses = addresses, .hosts = hosts};
  };
  CHECK_THROWS(InvalidUsage, Mesh(setup(2, 2, {0, 1})));
  CHECK_THROWS(InvalidUsage, Mesh(setup(0, 3, {0, 1})));
  CHECK_THROWS(InvalidUsage, Mesh(setup(0, 2, {0, 0})));  // one host, but no shared memory
  CHECK_THROWS(InvalidUsage, Mesh(setup(0, 0, {})));
}

/// At both ends: who connects to sets it, who is connected to has it from the listener.
TEST(connections_use_the_chosen_congestion_control) {
  Group group(2);
  group.run([](Mesh& mesh) {
    const Pipe* pipe = wait_for(mesh, 1 - mesh.rank(), ConnectionKind::collectives);
    char name[16] = {};
    socklen_t length = sizeof name;
    CHECK_EQ(::getsockopt(pipe->descriptor(), IPPROTO_TCP, TCP_CONGESTION, name, &length), 0);
    CHECK_EQ(std::string(name), congestion_control());
    CHECK(std::string(name).find("bbr") == std::string::npos);
  });
}

TEST(a_group_made_later_is_waited_for) {
  Group group(2, {}, Group::Start::first_alone);
  CHECK(group.rank(0).open(1, ConnectionKind::collectives) == nullptr);
  group.start(1);
  group.run([&](Mesh& mesh) {
    std::vector<Exchange> exchanges;
    exchanges.emplace_back(mesh, 1 - mesh.rank(), ConnectionKind::collectives, 1000);
    exchange(mesh, exchanges);
  });
}

}  // namespace
