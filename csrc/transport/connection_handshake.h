// The handshake messages of a TCP connection, which come before the first byte of its pipe. All messages have fixed
// sizes, so an unauthenticated connection cannot say how much to read:
//
//   initiator  Hello    the listener, group, ranks and kind that it wants, and a nonce
//   acceptor   Answer   its version and a nonce; at once, even if it does not know the group yet
//   initiator  Proof    digest of Hello and Answer under the group's key
//   acceptor   Proof    the same in another domain, when it takes the connection; in a third domain if it has left the
//                       group and has no final error
//
// Both nonces go into both proofs, so a recording of one connection proves nothing on another.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <span>
#include <type_traits>

#include "base/protocol.h"
#include "transport/token.h"

namespace ringlet {

static_assert(std::endian::native == std::endian::little, "numbers travel in the byte order of all supported machines");

inline constexpr uint32_t kWireMagic = 0x474e4952;  // "RING"

struct Hello {
  uint32_t magic = kWireMagic;
  uint32_t version = kProtocol;
  uint64_t listener = 0;
  Token group{};
  uint32_t from = 0;
  uint32_t to = 0;
  uint64_t which = 0;  ///< the initiator's
  Token nonce{};
};
struct Answer {
  uint32_t magic = kWireMagic;
  uint32_t version = kProtocol;
  Token nonce{};
};
using Proof = Token;
static_assert(std::has_unique_object_representations_v<Hello> && sizeof(Hello) == 64);
static_assert(std::has_unique_object_representations_v<Answer> && sizeof(Answer) == 24);

/// The purpose of a digest. A digest for one purpose proves nothing for another.
enum class Domain : uint64_t { group = 1, initiator, acceptor, departed };

/// The name of a group that unauthenticated connections may know.
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
