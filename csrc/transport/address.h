// The TCP addresses under which peers reach a process, packed into one text for the store.
//
// These are the addresses of RINGLET_INTERFACE (or GLOO_SOCKET_IFNAME: names, separated by commas). If that is not set:
// those of all interfaces that are up, first the one that leads to the store or MASTER_ADDR. Global addresses come
// before link-local ones, and loopback last. own_addresses() alone decides the order.
// Pure values. Thread safety: any.
#pragma once

#include <netinet/in.h>
#include <sys/socket.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "transport/socket.h"

namespace ringlet {

/// IPv4 or IPv6. An IPv4 address is kept in its IPv6 form (::ffff:a.b.c.d). A link-local IPv6 address leads somewhere
/// only together with an interface of this host, which no other host knows: it is not part of text(), if it is not set.
class Address {
 public:
  /// Throws InvalidUsage if `text` is not a numeric address.
  explicit Address(const std::string& text);
  explicit Address(const sockaddr* address);

  bool is_v4() const;
  bool is_loopback() const;
  bool is_link_local() const;
  /// The same address through this host's interface of that index.
  Address through(uint32_t interface) const;
  std::string text() const;
  /// For connect().
  sockaddr_storage with_port(uint16_t port, socklen_t& length) const;
  bool operator==(const Address&) const = default;

 private:
  std::array<uint8_t, 16> bytes_{};
  uint32_t interface_ = 0;
};

/// As text: "1 HOST LISTENER PORT ADDRESS,ADDRESS,...".
struct PeerAddress {
  static constexpr size_t kMostAddresses = 32;
  static constexpr size_t kMostBytes = 2048;

  uint64_t host = 0;      ///< its host_identity()
  uint64_t listener = 0;  ///< random: it tells this process from one that a stale address leads to
  uint16_t port = 0;
  std::vector<Address> addresses{};

  std::string pack() const;
  /// Throws InvalidUsage that says what is wrong with `text`.
  static PeerAddress unpack(const std::string& text);

  /// The addresses to try from here, best first. Loopback is among them only within a host, and is then the first. An
  /// IPv6 link-local address is there once for each interface of this host that has one, too.
  std::vector<Address> reachable_from(uint64_t own_host) const;
  /// The reason if there are none.
  std::string why_unreachable() const;
};

/// "10.0.0.1:4711" or "[fe80::1]:4711": the ends of a connection.
std::string own_end(const Socket& socket);
std::string other_end(const Socket& socket);

/// Equal for two processes if and only if loopback joins them and one can pass the other a descriptor: they have one
/// kernel and one network namespace.
uint64_t host_identity();

/// The addresses of this process, at most kMostAddresses. `interfaces` is as RINGLET_INTERFACE; empty: all, with the
/// one first that leads to `store`, the name or address of the host that serves the store, or to MASTER_ADDR. If a name
/// is unknown, throws InvalidUsage that lists the interfaces.
std::vector<Address> own_addresses(const std::string& interfaces, const std::string& store = "");

}  // namespace ringlet
