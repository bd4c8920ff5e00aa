#include "transport/congestion.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <string_view>

#include "base/error.h"
#include "base/process.h"
#include "transport/socket.h"

namespace ringlet {
namespace {

bool take(int socket, std::string_view name) noexcept {
  return ::setsockopt(socket, IPPROTO_TCP, TCP_CONGESTION, name.data(), static_cast<socklen_t>(name.size())) == 0;
}

std::string current(int socket) {
  char name[16] = {};  // the kernel's TCP_CA_NAME_MAX
  socklen_t length = sizeof name;
  if (::getsockopt(socket, IPPROTO_TCP, TCP_CONGESTION, name, &length) != 0) return "";
  return {name, ::strnlen(name, sizeof name)};
}

}  // namespace

std::string find_congestion_control() {
  Socket probe(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!probe.valid()) probe = Socket(::socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!probe.valid()) throw_errno("cannot make a TCP socket");
  const std::string machines = current(probe.get());
  const char* wish = std::getenv("RINGLET_TCP_CONGESTION");
  if (wish != nullptr && *wish != '\0') {
    if (std::string_view(wish) == "system" || take(probe.get(), wish)) return current(probe.get());
    throw InvalidUsage(std::string("RINGLET_TCP_CONGESTION names \"") + wish + "\": " + std::strerror(errno) +
                       "; /proc/sys/net/ipv4/tcp_allowed_congestion_control lists the names that are allowed here");
  }
  if (!machines.starts_with("bbr")) return machines;
  for (const char* instead : {"cubic", "reno"}) {
    if (take(probe.get(), instead)) return instead;
  }
  return machines;
}

const std::string& congestion_control() {
  struct Chosen {
    const std::string name = find_congestion_control();
  };
  static constinit OfProcess<Chosen> of_process;
  return of_process.get().name;
}

void use_congestion_control(int socket) noexcept { take(socket, congestion_control()); }

}  // namespace ringlet
