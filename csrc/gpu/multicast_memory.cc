#include "gpu/multicast_memory.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>

#include "base/error.h"
#include "base/runtime.h"
#include "base/system_call.h"
#include "gpu/check_device.h"

namespace ringlet {
namespace {

constexpr char kHanded = 'd', kNone = '-';  // with a descriptor, or for want of one

[[noreturn]] void refuse(const char* what) {
  throw SystemError(std::string(what) + " of a multicast object: " + std::strerror(errno));
}

/// No file: it goes with the socket.
sockaddr_un address_of(const Token& name) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  return address;
}
constexpr socklen_t kAddressBytes = offsetof(sockaddr_un, sun_path) + 1 + sizeof(Token);

/// A message of one byte with room for a descriptor or a sender's credentials.
struct Parcel {
  char word = kNone;
  alignas(cmsghdr) char space[CMSG_SPACE(sizeof(int)) + CMSG_SPACE(sizeof(ucred))] = {};
  iovec data{&word, 1};
  msghdr message{};

  explicit Parcel(size_t room) {
    message.msg_iov = &data;
    message.msg_iovlen = 1;
    message.msg_control = room == 0 ? nullptr : space;
    message.msg_controllen = room;
  }
  Parcel(const Parcel&) = delete;
};

/// Does not wait for room, which other processes could take.
bool send(int socket, const Token& to, int descriptor) {
  Parcel parcel(descriptor < 0 ? 0 : CMSG_SPACE(sizeof(int)));
  sockaddr_un address = address_of(to);
  parcel.message.msg_name = &address;
  parcel.message.msg_namelen = kAddressBytes;
  if (descriptor >= 0) {
    parcel.word = kHanded;
    cmsghdr* rights = CMSG_FIRSTHDR(&parcel.message);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(rights), &descriptor, sizeof descriptor);
  }
  return repeated([&] { return ::sendmsg(socket, &parcel.message, MSG_NOSIGNAL | MSG_DONTWAIT); }) == 1;
}

struct Delivery {
  char word = kNone;
  Descriptor descriptor;
  bool own_user = false;
};

Delivery receive(int socket) {
  Parcel parcel(sizeof(Parcel::space));
  const ssize_t bytes = repeated([&] { return ::recvmsg(socket, &parcel.message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT); });
  Delivery delivery;
  if (bytes != 1) return delivery;
  delivery.word = parcel.word;
  for (cmsghdr* part = CMSG_FIRSTHDR(&parcel.message); part != nullptr; part = CMSG_NXTHDR(&parcel.message, part)) {
    if (part->cmsg_type == SCM_RIGHTS) {
      int descriptor = -1;
      std::memcpy(&descriptor, CMSG_DATA(part), sizeof descriptor);
      delivery.descriptor = Descriptor(descriptor);
    } else if (part->cmsg_type == SCM_CREDENTIALS) {
      ucred sender{};
      std::memcpy(&sender, CMSG_DATA(part), sizeof sender);
      delivery.own_user = sender.uid == ::geteuid();
    }
  }
  return delivery;
}

}  // namespace

MulticastMemory::MulticastMemory(const RingletCudaDevice& device, size_t bytes)
    : device_(device), socket_(::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0)) {
  const sockaddr_un address = address_of(name_);
  const int on = 1;
  if (socket_.get() < 0 || ::bind(socket_.get(), reinterpret_cast<const sockaddr*>(&address), kAddressBytes) != 0 ||
      ::setsockopt(socket_.get(), SOL_SOCKET, SO_PASSCRED, &on, sizeof on) != 0) {
    refuse("making a socket for the descriptor");
  }
  made_.bytes = bytes;
}

MulticastMemory::~MulticastMemory() {
  // A device that refuses keeps the memory; nobody is here to hear of it.
  if (made_.object != 0) device_.release_multicast(&made_);
}

void MulticastMemory::join(const std::vector<Token>& mailboxes, int rank, const Deadline& deadline,
                           const std::function<void()>& look) {
  made_.devices = static_cast<int>(mailboxes.size());
  rank == 0 ? make(mailboxes) : take(deadline, look);
  check_device(device_, device_.join_multicast(&made_), "joining a multicast object");
}

void MulticastMemory::make(const std::vector<Token>& mailboxes) {
  int descriptor = -1;
  const int code = device_.make_multicast(&made_, &descriptor);
  const Descriptor own(descriptor);
  bool sent = true;
  for (size_t q = 1; q < mailboxes.size(); ++q) sent = send(socket_.get(), mailboxes[q], own.get()) && sent;
  const int why = errno;
  check_device(device_, code, "making a multicast object");
  if (!sent) errno = why, refuse("handing over the descriptor");
}

void MulticastMemory::take(const Deadline& deadline, const std::function<void()>& look) {
  for (;;) {
    pollfd wait{socket_.get(), POLLIN, 0};
    const auto piece = std::min(deadline.left(), kInterruptCheckEvery);
    if (::poll(&wait, 1, static_cast<int>(piece.count())) <= 0) {
      if (deadline.passed()) throw DeviceError("rank 0 has handed over no multicast object in time");
      look();
      continue;
    }
    const Delivery delivery = receive(socket_.get());
    if (!delivery.own_user) continue;
    if (delivery.word != kHanded) throw DeviceError("rank 0 could make no multicast object");
    check_device(device_, device_.take_multicast(&made_, delivery.descriptor.get()), "taking a multicast object");
    return;
  }
}

void MulticastMemory::map() { check_device(device_, device_.map_multicast(&made_), "mapping multicast memory"); }

}  // namespace ringlet
