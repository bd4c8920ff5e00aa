// Who connects to a listener without belonging there.
#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdint>
#include <stdexcept>
#include <utility>

#include "mesh_group.h"
#include "transport/socket.h"

inline sockaddr_in on_loopback(uint16_t port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(port);
  return address;
}

class UnauthenticatedClient {
 public:
  explicit UnauthenticatedClient(ringlet::Socket socket) : socket_(std::move(socket)) {}
  explicit UnauthenticatedClient(uint16_t port) : socket_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    const sockaddr_in address = on_loopback(port);
    if (::connect(socket_.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) {
      throw std::runtime_error("an unauthenticated connection cannot connect");
    }
  }

  void say(const void* data, size_t bytes) {
    ::send(socket_.get(), data, bytes, MSG_NOSIGNAL);  // refused where the listener has closed already
  }
  void say(const Bytes& data) { say(data.data(), data.size()); }

  /// As many bytes as come until the other side closes, at most `most`.
  Bytes hear(size_t most) {
    Bytes heard;
    std::byte byte;
    while (heard.size() < most && readable() && ::recv(socket_.get(), &byte, 1, 0) == 1) heard.push_back(byte);
    return heard;
  }
  /// Waits for the other side to close.
  bool is_dropped() { return hear(1).empty() && !timed_out_; }

 private:
  bool readable() {
    pollfd ready{socket_.get(), POLLIN, 0};
    timed_out_ = ::poll(&ready, 1, 60'000) <= 0;
    return !timed_out_;
  }

  ringlet::Socket socket_;
  bool timed_out_ = false;
};

/// Waits for connections as a listener would.
class FalseListener {
 public:
  FalseListener() : listener_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in address = on_loopback(0);
    socklen_t length = sizeof address;
    if (::bind(listener_.get(), reinterpret_cast<const sockaddr*>(&address), length) != 0 ||
        ::listen(listener_.get(), 16) != 0 ||
        ::getsockname(listener_.get(), reinterpret_cast<sockaddr*>(&address), &length) != 0) {
      throw std::runtime_error("a false listener cannot listen");
    }
    port_ = ntohs(address.sin_port);
  }
  uint16_t port() const { return port_; }
  UnauthenticatedClient receive() {
    return UnauthenticatedClient(ringlet::Socket(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC)));
  }

 private:
  ringlet::Socket listener_;
  uint16_t port_;
};
