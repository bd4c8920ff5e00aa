// Unauthenticated connections at the listener: noise, truncated and replayed handshakes, other versions, slow
// clients, false listeners; all while a group works and others are made.
#include "transport/listener.h"

#include <fcntl.h>

#include <atomic>
#include <filesystem>
#include <random>

#include "transport/address.h"
#include "transport/connection_handshake.h"
#include "transport/incoming_connection.h"
#include "unauthenticated_client.h"

using namespace ringlet;
using namespace std::chrono_literals;

namespace {

PeerAddress own_peer_address() { return PeerAddress::unpack(Mesh::address()); }

Hello hello_to(const Group& group) {
  return {.listener = own_peer_address().listener,
          .group = group_name(group.key()),
          .from = 1,
          .to = 0,
          .nonce = random_token()};
}

template <typename Message>
Bytes bytes_of(const Message& message) {
  const auto* bytes = reinterpret_cast<const std::byte*>(&message);
  return Bytes(bytes, bytes + sizeof message);
}

size_t descriptors() {
  const std::filesystem::directory_iterator all("/proc/self/fd");
  return static_cast<size_t>(std::distance(begin(all), end(all)));
}

Group::AddressChange through(uint16_t port) {
  return [port](int, PeerAddress& address) {
    address.port = port;
    address.addresses = {Address(std::string("127.0.0.1"))};
  };
}

/// What rank 0 says to rank 1 when it connects: overheard by one who stands between.
Bytes overhear(Group& group, FalseListener& between) {
  CHECK(group.rank(0).open(1, ConnectionKind::messages) == nullptr);
  UnauthenticatedClient initiator = between.receive();
  UnauthenticatedClient listener(own_peer_address().port);
  Bytes said = initiator.hear(sizeof(Hello));
  listener.say(said);
  initiator.say(listener.hear(sizeof(Answer)));
  const Bytes proof = initiator.hear(sizeof(Proof));
  listener.say(proof);
  initiator.say(listener.hear(sizeof(Proof)));
  wait_for(group.rank(0), 1, ConnectionKind::messages);
  said.insert(said.end(), proof.begin(), proof.end());
  return said;
}

/// One hostile connection; those that stay open and silent are kept.
void knock(int kind, Group& group, const Bytes& overheard, std::vector<UnauthenticatedClient>& kept) {
  std::mt19937 random(static_cast<unsigned>(kind));
  UnauthenticatedClient client(own_peer_address().port);
  Hello hello = hello_to(group);
  const Bytes noise = pattern(random() % 5000, kind, 7);
  switch (kind % 10) {
    case 0: client.say(noise); break;
    case 1: client.say(bytes_of(hello).data(), random() % sizeof hello); break;
    case 2: client.say(Bytes(4096, std::byte{0xff})); break;
    case 3: kept.push_back(std::move(client)); break;
    case 4: client.say(overheard); break;
    case 5: hello.version = 77, client.say(bytes_of(hello)); break;
    case 6: hello.group = random_token(), client.say(bytes_of(hello)), client.say(noise); break;
    case 7: client.say(bytes_of(hello)), client.say(pattern(sizeof(Proof), kind, 8)); break;
    case 8: client.say("GET / HTTP/1.1\r\n\r\n", 18); break;
    case 9: client.say(noise.data(), 1), kept.push_back(std::move(client)); break;
  }
}

TEST(a_thousand_unauthenticated_connections_do_no_harm) {
  FalseListener between;
  Group watched(2, through(between.port()));
  const Bytes overheard = overhear(watched, between);
  Group group(2);
  const auto one_exchange = [](Mesh& mesh) {
    std::vector<Exchange> exchanges;
    exchanges.emplace_back(mesh, 1 - mesh.rank(), ConnectionKind::collectives, 500'000);
    exchange(mesh, exchanges);
  };
  group.run(one_exchange);
  const size_t before = descriptors();
  std::atomic<bool> over{false};
  std::vector<UnauthenticatedClient> kept;
  std::thread clients([&] {
    for (int i = 0; i < 1000; ++i) knock(i, group, overheard, kept);
    over = true;
  });
  int rounds = 0;
  for (; rounds < 3 || !over; ++rounds) {
    group.run(one_exchange);
    Group another(2);
    another.run(one_exchange);
  }
  clients.join();
  CHECK(kept.size() == 200);
  // Those kept by unauthenticated connections lie in this process, too; the listener's: 128 unnamed, and named ones
  // whose proof may still come.
  CHECK(descriptors() <= before + kept.size() + 128 + 300);
  CHECK(kept.front().is_dropped());
  CHECK(group.rank(0).connections() == 1 && group.rank(1).connections() == 1);
}

TEST(what_was_overheard_opens_nothing) {
  FalseListener between;
  Group group(2, through(between.port()));
  const Bytes overheard = overhear(group, between);
  UnauthenticatedClient again(own_peer_address().port);
  again.say(overheard);
  // The answer has a new nonce, so the old proof is wrong.
  CHECK_EQ(again.hear(sizeof(Answer) + sizeof(Proof)).size(), sizeof(Answer));
  CHECK_EQ(group.rank(1).connections(), 1);
}

TEST(silence_is_not_listened_to_for_ever) {
  UnauthenticatedClient silent(own_peer_address().port);
  UnauthenticatedClient slow(own_peer_address().port);
  slow.say("RING", 4);
  CHECK(silent.is_dropped());
  CHECK(slow.is_dropped());
}

TEST(false_listeners_are_detected) {
  const auto refusal = [](const std::function<void(UnauthenticatedClient&)>& play) {
    FalseListener listener;
    Group group(2, through(listener.port()));
    std::thread player([&] {
      UnauthenticatedClient initiator = listener.receive();
      initiator.hear(sizeof(Hello));
      play(initiator);
      CHECK(initiator.is_dropped());
    });
    std::string message = "connected";
    try {
      wait_for(group.rank(0), 1, ConnectionKind::collectives);
    } catch (const Error& error) {
      message = error.what();
    }
    player.join();
    return message;
  };
  CHECK_HAS(refusal([](UnauthenticatedClient& s) { s.say(bytes_of(Answer{.version = 2})); }),
            "speaks version 2 of ringlet's protocol");
  CHECK_HAS(refusal([](UnauthenticatedClient& s) { s.say("HTTP/1.1 400 Bad Request\r\n\r\n", 28); }),
            "a program other than ringlet");
  CHECK_HAS(refusal([](UnauthenticatedClient& s) {
              s.say(bytes_of(Answer{}));
              s.hear(sizeof(Proof));
              s.say(bytes_of(random_token()));
            }),
            "does not know this group's secret");
}

TEST(who_left_says_so) {
  Group group(2, {}, Group::Start::all);
  group.rank(1).close(Deadline::after(0ms));
  CHECK_HAS(CHECK_THROWS(PeerLost, wait_for(group.rank(0), 1, ConnectionKind::collectives)), "left the group");
}

/// Handshakes with some bytes changed, cut and given in pieces: no proof is taken but the right one.
TEST(changed_handshakes_prove_nothing) {
  std::mt19937 random(1);
  const Token key = random_token();
  for (int i = 0; i < 20'000; ++i) {
    int ends[2];
    CHECK(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends) == 0);
    IncomingConnection incoming(Socket(ends[0]), 7);
    UnauthenticatedClient client{Socket(ends[1])};
    const Hello hello{.listener = 7, .group = group_name(key), .from = 1, .to = 0, .nonce = random_token()};
    Hello said = hello;
    const bool change_hello = random() % 2 == 0;
    if (change_hello) reinterpret_cast<uint8_t*>(&said)[random() % sizeof said] ^= 1u << random() % 8;
    const size_t first = random() % sizeof said;
    client.say(&said, first);
    incoming.advance();
    client.say(bytes_of(said).data() + first, sizeof said - first);
    Answer answer;
    if (incoming.advance() != IncomingConnection::State::named) continue;
    const Bytes heard = client.hear(sizeof answer);
    std::memcpy(&answer, heard.data(), sizeof answer);
    Proof proof = prove(key, Domain::initiator, hello, answer);
    const bool change_proof = random() % 4 == 0;
    if (change_proof) proof[random() % proof.size()] ^= 1u << random() % 8;
    client.say(&proof, sizeof proof);
    CHECK(incoming.advance() == IncomingConnection::State::waiting);
    CHECK_EQ(incoming.proves(key), !change_hello && !change_proof);
    client.say("x", 1);  // before it is welcome
    CHECK(incoming.advance() == IncomingConnection::State::gone);
  }
}

}  // namespace
