// The five kinds of error, the same in C++ and Python.
//
// Contract: every failure leaves this library as an Error. Its message says which rank, in which operation, with which
// peer, how far, after how long, and what to do. The library prints an error only if RINGLET_LOG is set (base/log.h).
// Thread safety: immutable once made.
#pragma once

#include <new>
#include <stdexcept>
#include <string>

namespace ringlet {

enum class ErrorKind : unsigned char { invalid_usage, peer_lost, timeout, resource_error, device_error };

[[noreturn]] void rethrow(ErrorKind kind, const std::string& message, bool reported);

class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& message) : std::runtime_error(message), kind_(kind) {}
  ErrorKind kind() const noexcept { return kind_; }
  /// Another rank's error, which it reported.
  bool reported() const noexcept { return reported_; }

 private:
  friend void ringlet::rethrow(ErrorKind kind, const std::string& message, bool reported);
  ErrorKind kind_;
  bool reported_ = false;
};

struct InvalidUsage : Error {
  explicit InvalidUsage(const std::string& message) : Error(ErrorKind::invalid_usage, message) {}
};
struct PeerLost : Error {
  explicit PeerLost(const std::string& message) : Error(ErrorKind::peer_lost, message) {}
};
struct Timeout : Error {
  explicit Timeout(const std::string& message) : Error(ErrorKind::timeout, message) {}
};
struct ResourceError : Error {
  explicit ResourceError(const std::string& message) : Error(ErrorKind::resource_error, message) {}
};
struct DeviceError : Error {
  explicit DeviceError(const std::string& message) : Error(ErrorKind::device_error, message) {}
};

const char* name(ErrorKind kind) noexcept;

/// Throws the class of `kind`: for an error that was kept, or that a peer reported.
[[noreturn]] void rethrow(ErrorKind kind, const std::string& message, bool reported = false);

/// The text that `make` returns, or kOutOfMemory if there is no memory for it. For a failure that must be told anyway.
inline constexpr char kOutOfMemory[] = "out of memory";  // so short that a std::string of it takes no memory
template <typename Make>
std::string in_words(const Make& make) noexcept {
  try {
    return make();
  } catch (const std::bad_alloc&) {
    return kOutOfMemory;
  }
}

/// Throws ResourceError with the text of errno: "memfd_create: Too many open files (errno 24); <advice>".
[[noreturn]] void throw_errno(const std::string& what, const std::string& advice = "");

}  // namespace ringlet
