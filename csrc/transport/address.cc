#include "transport/address.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <memory>
#include <optional>
#include <sstream>

#include "base/error.h"
#include "memory/mapping.h"

namespace ringlet {
namespace {

constexpr std::array<uint8_t, 12> kV4Prefix{0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};

/// An address of an interface.
struct Interface {
  std::string name;
  Address address;
  bool up;
};

std::vector<Interface> interfaces_here() {
  ifaddrs* first = nullptr;
  if (::getifaddrs(&first) != 0) throw_errno("getifaddrs");
  const std::unique_ptr<ifaddrs, void (*)(ifaddrs*)> list(first, ::freeifaddrs);
  std::vector<Interface> found;
  for (const ifaddrs* entry = first; entry != nullptr; entry = entry->ifa_next) {
    const sockaddr* address = entry->ifa_addr;
    if (address == nullptr || (address->sa_family != AF_INET && address->sa_family != AF_INET6)) continue;
    constexpr unsigned kWorking = IFF_UP | IFF_RUNNING;
    found.push_back({entry->ifa_name, Address(address), (entry->ifa_flags & kWorking) == kWorking});
  }
  return found;
}

bool needs_interface(const Address& address) { return !address.is_v4() && address.is_link_local(); }

/// Without blanks around the parts, and without empty ones.
std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, separator);) {
    part.erase(part.find_last_not_of(' ') + 1);
    part.erase(0, part.find_first_not_of(' '));
    if (!part.empty()) parts.push_back(part);
  }
  return parts;
}

/// The addresses of the named interfaces, or of all that are up.
std::vector<Interface> chosen(const std::vector<Interface>& all, const std::string& names) {
  std::vector<Interface> found;
  for (const Interface& each : all) {
    if (names.empty() && each.up) found.push_back(each);
  }
  const std::vector<std::string> wanted = split(names, ',');
  if (wanted.empty() && !names.empty()) {
    throw InvalidUsage("RINGLET_INTERFACE (or GLOO_SOCKET_IFNAME) is \"" + names + "\", which names no interface");
  }
  for (const std::string& name : wanted) {
    const size_t before = found.size();
    for (const Interface& each : all) {
      if (each.name == name) found.push_back(each);
    }
    if (found.size() > before) continue;
    std::string there;
    for (const Interface& each : all)
      there += (there.empty() ? "" : ", ") + each.name + " (" + each.address.text() + ")";
    throw InvalidUsage("RINGLET_INTERFACE (or GLOO_SOCKET_IFNAME) names \"" + name +
                       "\", but no interface of that name has an address here; " +
                       "there are: " + (there.empty() ? "none" : there));
  }
  return found;
}

/// The address from which this process sends packets to that host; none if it is this one, by loopback, which says
/// nothing about the way to other hosts. To connect a datagram socket sends no packet.
std::optional<Address> towards(const char* host) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_DGRAM;
  addrinfo* first = nullptr;
  if (host == nullptr || *host == '\0' || ::getaddrinfo(host, "9", &hints, &first) != 0) return std::nullopt;
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> list(first, ::freeaddrinfo);
  for (const addrinfo* entry = first; entry != nullptr; entry = entry->ai_next) {
    const Descriptor probe(::socket(entry->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    sockaddr_storage own{};
    socklen_t length = sizeof own;
    if (probe.valid() && ::connect(probe.get(), entry->ai_addr, entry->ai_addrlen) == 0 &&
        ::getsockname(probe.get(), reinterpret_cast<sockaddr*>(&own), &length) == 0) {
      const Address found(reinterpret_cast<const sockaddr*>(&own));
      if (!found.is_loopback()) return found;
    }
  }
  return std::nullopt;
}

[[noreturn]] void refuse(const std::string& what) {
  throw InvalidUsage("a rank published an address that this version of ringlet cannot read (" + what +
                     "): install the same version on all hosts");
}

}  // namespace

Address::Address(const std::string& text) {
  std::copy(kV4Prefix.begin(), kV4Prefix.end(), bytes_.begin());
  if (::inet_pton(AF_INET, text.c_str(), bytes_.data() + kV4Prefix.size()) == 1) return;
  if (::inet_pton(AF_INET6, text.c_str(), bytes_.data()) != 1) refuse("not an address: " + text.substr(0, 64));
}

namespace {

using NameOf = int (*)(int, sockaddr*, socklen_t*);

std::string end_of(const Socket& socket, NameOf name_of) {
  sockaddr_storage storage{};
  socklen_t length = sizeof storage;
  auto* const address = reinterpret_cast<sockaddr*>(&storage);
  if (name_of(socket.get(), address, &length) != 0) return "nowhere";
  const Address of(address);
  const uint16_t port =
      ntohs(reinterpret_cast<const sockaddr_in*>(address)->sin_port);  // at one place in both families
  return (of.is_v4() ? of.text() : '[' + of.text() + ']') + ':' + std::to_string(port);
}

}  // namespace

std::string own_end(const Socket& socket) { return end_of(socket, ::getsockname); }
std::string other_end(const Socket& socket) { return end_of(socket, ::getpeername); }

Address::Address(const sockaddr* address) {
  if (address->sa_family == AF_INET) {
    std::copy(kV4Prefix.begin(), kV4Prefix.end(), bytes_.begin());
    std::memcpy(bytes_.data() + kV4Prefix.size(), &reinterpret_cast<const sockaddr_in*>(address)->sin_addr, 4);
  } else {
    std::memcpy(bytes_.data(), &reinterpret_cast<const sockaddr_in6*>(address)->sin6_addr, bytes_.size());
  }
}

bool Address::is_v4() const { return std::equal(kV4Prefix.begin(), kV4Prefix.end(), bytes_.begin()); }

bool Address::is_loopback() const {
  static constexpr std::array<uint8_t, 16> kV6Loopback{0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1};
  return is_v4() ? bytes_[12] == 127 : bytes_ == kV6Loopback;
}

bool Address::is_link_local() const {
  return is_v4() ? bytes_[12] == 169 && bytes_[13] == 254 : bytes_[0] == 0xfe && (bytes_[1] & 0xc0) == 0x80;
}

Address Address::through(uint32_t interface) const {
  Address address = *this;
  address.interface_ = interface;
  return address;
}

std::string Address::text() const {
  char buffer[INET6_ADDRSTRLEN] = {}, name[IF_NAMESIZE] = {};
  if (is_v4()) return ::inet_ntop(AF_INET, bytes_.data() + kV4Prefix.size(), buffer, sizeof buffer);
  const std::string text = ::inet_ntop(AF_INET6, bytes_.data(), buffer, sizeof buffer);
  return interface_ != 0 && ::if_indextoname(interface_, name) != nullptr ? text + '%' + name : text;
}

sockaddr_storage Address::with_port(uint16_t port, socklen_t& length) const {
  sockaddr_storage storage{};
  if (is_v4()) {
    auto& v4 = reinterpret_cast<sockaddr_in&>(storage);
    v4.sin_family = AF_INET;
    v4.sin_port = htons(port);
    std::memcpy(&v4.sin_addr, bytes_.data() + kV4Prefix.size(), 4);
    length = sizeof v4;
  } else {
    auto& v6 = reinterpret_cast<sockaddr_in6&>(storage);
    v6.sin6_family = AF_INET6;
    v6.sin6_port = htons(port);
    std::memcpy(&v6.sin6_addr, bytes_.data(), bytes_.size());
    v6.sin6_scope_id = interface_;
    length = sizeof v6;
  }
  return storage;
}

std::string PeerAddress::pack() const {
  std::ostringstream text;
  text << host << ' ' << listener << ' ' << port << ' ';
  for (size_t i = 0; i < std::min(addresses.size(), kMostAddresses); ++i) {
    text << (i == 0 ? "" : ",") << addresses[i].text();
  }
  return text.str();
}

PeerAddress PeerAddress::unpack(const std::string& text) {
  if (text.size() > kMostBytes) refuse(std::to_string(text.size()) + " bytes");
  std::istringstream stream(text);
  PeerAddress address;
  std::string list, more;
  if (!(stream >> address.host >> address.listener >> address.port >> list) || stream >> more)
    refuse("not of four fields");
  for (const std::string& one : split(list, ',')) address.addresses.emplace_back(one);
  if (address.addresses.empty() || address.addresses.size() > kMostAddresses || address.port == 0)
    refuse("not reachable");
  return address;
}

std::vector<Address> PeerAddress::reachable_from(uint64_t own_host) const {
  std::vector<Address> order;
  for (const Address& each : addresses) {
    if (each.is_loopback() && own_host != host) continue;
    if (!needs_interface(each)) {
      order.push_back(each);
      continue;
    }
    for (const Interface& own : interfaces_here()) {
      if (own.up && needs_interface(own.address)) order.push_back(each.through(::if_nametoindex(own.name.c_str())));
    }
  }
  std::stable_partition(order.begin(), order.end(), [](const Address& each) { return each.is_loopback(); });
  return order;
}

std::string PeerAddress::why_unreachable() const {
  const bool loopback =
      std::all_of(addresses.begin(), addresses.end(), [](const auto& each) { return each.is_loopback(); });
  return std::string(loopback
                         ? "it has only loopback addresses, which other hosts cannot reach"
                         : "it has only IPv6 link-local addresses, and no interface of this host that is up has one") +
         ": set RINGLET_INTERFACE there to choose others";
}

uint64_t host_identity() {
  std::string boot;
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  // Where there is no such file, no rank has it.
  if (!file.is_open() && (errno == EMFILE || errno == ENFILE)) throw_errno("cannot read which host this is");
  std::getline(file, boot);
  struct stat network{};
  ::stat("/proc/self/ns/net", &network);
  return std::hash<std::string>{}(boot) * 1000003u ^ network.st_ino;
}

std::vector<Address> own_addresses(const std::string& interfaces, const std::string& store) {
  std::vector<Interface> found = chosen(interfaces_here(), interfaces);
  // Every interface has an IPv6 link-local address. If it has another, that one leads along the same cable.
  const std::vector<Interface> all = found;
  std::erase_if(found, [&](const Interface& each) {
    return needs_interface(each.address) && std::any_of(all.begin(), all.end(), [&](const Interface& other) {
             return other.name == each.name && !other.address.is_link_local();
           });
  });
  if (interfaces.empty()) {
    std::optional<Address> best = towards(store.c_str());
    if (!best) best = towards(std::getenv("MASTER_ADDR"));
    std::map<std::string, int> seen;  // by interface: one with many addresses must not hide the others
    std::vector<std::pair<std::pair<int, int>, Interface>> ranked;
    for (const Interface& each : found) {
      const Address& address = each.address;
      const int kind = best == address ? 0 : address.is_loopback() ? 3 : address.is_link_local() ? 2 : 1;
      ranked.push_back({{kind, seen[each.name]++}, each});
    }
    std::stable_sort(ranked.begin(), ranked.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
    std::transform(ranked.begin(), ranked.end(), found.begin(), [](const auto& each) { return each.second; });
  }
  std::vector<Address> addresses;
  for (const Interface& each : found) {
    if (std::find(addresses.begin(), addresses.end(), each.address) == addresses.end()) {
      addresses.push_back(each.address);
    }
  }
  while (addresses.size() > PeerAddress::kMostAddresses) {
    const auto last =
        std::find_if_not(addresses.rbegin(), addresses.rend(), [](const Address& a) { return a.is_loopback(); });
    addresses.erase(last == addresses.rend() ? addresses.end() - 1 : std::next(last).base());
  }
  return addresses;
}

}  // namespace ringlet
