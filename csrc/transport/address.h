// Where a process can be reached over TCP: its addresses as others see them, packed into one text for the store.
//
// Which addresses: those of RINGLET_INTERFACE (or GLOO_SOCKET_IFNAME; names, separated by commas), else all global ones
// of interfaces that are up, the one that leads to MASTER_ADDR first, loopback last. Pure values. Thread safety: any.
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

/// IPv4 or IPv6: an IPv4 address is held as the IPv6 address that stands for it (::ffff:a.b.c.d).
class Address {
 public:
  /// Throws InvalidUsage where `text` is no numeric address.
  explicit Address(const std::string& text);
  explicit Address(const sockaddr* address);

  bool is_v4() const;
  bool is_loopback() const;
  bool is_link_local() const;
  std::string text() const;
  /// For connect().
  sockaddr_storage with_port(uint16_t port, socklen_t& length) const;
  bool operator==(const Address&) const = default;

 private:
  std::array<uint8_t, 16> bytes_{};
};

/// As text: "1 HOST LISTENER PORT ADDRESS,ADDRESS,...".
struct PeerAddress {
  static constexpr size_t kMostAddresses = 16;
  static constexpr size_t kMostBytes = 1024;

  uint64_t host = 0;      ///< host_identity() there
  uint64_t listener = 0;  ///< random: who shows it means this process, and not one that a stale address leads to
  uint16_t port = 0;
  std::vector<Address> addresses{};

  std::string pack() const;
  /// Throws InvalidUsage saying what is wrong with it.
  static PeerAddress unpack(const std::string& text);

  /// The addresses worth trying from here, best first: loopback inside a host only, and there before the others.
  std::vector<Address> reachable_from(uint64_t own_host) const;
};

/// "10.0.0.1:4711" or "[fe80::1]:4711": the ends of a connection.
std::string own_end(const Socket& socket);
std::string other_end(const Socket& socket);

/// The same for two processes exactly where loopback joins them and one can hand the other a descriptor: one kernel,
/// one network namespace.
uint64_t host_identity();

/// This process's addresses. `interfaces` as in RINGLET_INTERFACE, empty for automatic choice. Throws InvalidUsage
/// listing the interfaces there are, where one of the names is not among them.
std::vector<Address> own_addresses(const std::string& interfaces);

}  // namespace ringlet
