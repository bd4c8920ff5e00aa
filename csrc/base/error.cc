#include "base/error.h"

#include <cerrno>
#include <cstring>

namespace ringlet {

const char* name(ErrorKind kind) noexcept {
  switch (kind) {
    case ErrorKind::invalid_usage: return "InvalidUsage";
    case ErrorKind::peer_lost: return "PeerLost";
    case ErrorKind::timeout: return "Timeout";
    case ErrorKind::resource_error: return "ResourceError";
    case ErrorKind::device_error: return "DeviceError";
  }
  return "Error";
}

void rethrow(ErrorKind kind, const std::string& message, bool reported) {
  const auto raise = [reported](auto error) {
    error.reported_ = reported;
    throw error;
  };
  switch (kind) {
    case ErrorKind::invalid_usage: raise(InvalidUsage(message)); break;
    case ErrorKind::peer_lost: raise(PeerLost(message)); break;
    case ErrorKind::timeout: raise(Timeout(message)); break;
    case ErrorKind::resource_error: raise(ResourceError(message)); break;
    case ErrorKind::device_error: raise(DeviceError(message)); break;
  }
  throw Error(kind, message);
}

void throw_errno(const std::string& what, const std::string& advice) {
  const int code = errno;
  std::string message = what + ": " + std::strerror(code) + " (errno " + std::to_string(code) + ")";
  if (!advice.empty()) message += "; " + advice;
  if (advice.empty() && code == EMFILE) message += "; raise ulimit -n, or close files";
  throw ResourceError(message);
}

}  // namespace ringlet
