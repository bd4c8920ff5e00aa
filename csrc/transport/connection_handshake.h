// What is said on a TCP connection before its first byte belongs to a pipe. All messages have fixed sizes, so that an
// unauthenticated connection never says how much to read:
//
//   initiator   Hello    which listener, group, ranks and kind it wants, and a nonce
//   acceptor  Answer   at once, whether it knows the group yet or not: its version and a nonce
//   initiator   Proof    digest of Hello and Answer under the group's key
//   acceptor  Proof    the same in another domain, once it takes the connection, or in a third if it has left the group
//                      and has nothing more to say
//
// Both nonces go into both proofs, so what was recorded from one connection proves nothing on another.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "transport/pipe.h"
#include "transport/token.h"

namespace ringlet {

static_assert(std::endian::native == std::endian::little, "numbers travel in the byte order of all supported machines");

inline constexpr uint32_t kWireMagic = 0x474e4952;  // "RING"
inline constexpr uint32_t kWireVersion = 1;

struct Hello {
  uint32_t magic = kWireMagic;
  uint32_t version = kWireVersion;
  uint64_t listener = 0;
  Token group{};
  uint32_t from = 0;
  uint32_t to = 0;
  uint64_t which = 0;  ///< the initiator's
  Token nonce{};
};
struct Answer {
  uint32_t magic = kWireMagic;
  uint32_t version = kWireVersion;
  Token nonce{};
};
using Proof = Token;
static_assert(std::has_unique_object_representations_v<Hello> && sizeof(Hello) == 64);
static_assert(std::has_unique_object_representations_v<Answer> && sizeof(Answer) == 24);

/// What the digest is for: one made for one purpose serves no other.
enum class Domain : uint64_t { group = 1, initiator, acceptor, departed };

/// By what name unauthenticated connections may know a group.
inline Token group_name(const Token& key) {
  const Domain domain = Domain::group;
  return siphash(key, std::as_bytes(std::span(&domain, 1)));
}

inline Proof prove(const Token& key, Domain domain, const Hello& hello, const Answer& answer) {
  std::byte said[sizeof domain + sizeof hello + sizeof answer];
  std::memcpy(said, &domain, sizeof domain);
  std::memcpy(said + sizeof domain, &hello, sizeof hello);
  std::memcpy(said + sizeof domain + sizeof hello, &answer, sizeof answer);
  return siphash(key, said);
}

}  // namespace ringlet
