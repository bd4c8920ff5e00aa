// The device as gpu_check uses it: memory that is filled and read from the host, streams, and clocks.
//
// Contract: what fails throws. A stream is waited for at most for a time that is stated, and then throws Timeout.
// Memory is filled and read on a stream that no kernel is on, so a stream that works on it is waited for before.
// Ownership: Memory and Stream own what they name, and keep it where `device_hangs` (section.h).
// Thread safety: one thread at a time for each object.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "base/deadline.h"
#include "base/error.h"
#include "gpu/gpu.h"
#include "reduce_cases.h"
#include "section.h"

namespace gpu_check {

using namespace ringlet;
using reduce_reference::Bytes;

inline const RingletCudaDevice& device() { return gpu_device(); }

inline void ok(int code, const char* what) {
  if (code != 0) throw DeviceError(std::string(what) + ": " + device().explain(code));
}

/// A stream that no kernel is on.
inline void* beside() {
  static void* const stream = [] {
    void* made = nullptr;
    ok(device().create_stream(&made), "making a stream");
    return made;
  }();
  return stream;
}

class Memory {
 public:
  explicit Memory(size_t bytes) : bytes_(bytes) {
    void* memory = nullptr;
    ok(device().allocate(&memory, std::max<size_t>(bytes, 1)), "allocating memory");
    data_ = static_cast<std::byte*>(memory);
  }
  ~Memory() {
    if (!device_hangs) device().release(data_);
  }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  std::byte* data() const { return data_; }
  size_t size() const { return bytes_; }

  void fill(const Bytes& from, size_t at = 0) {
    if (!from.empty()) ok(device().upload(data_ + at, from.data(), from.size(), beside()), "filling memory");
  }
  Bytes read(size_t at, size_t bytes) const {
    Bytes part(bytes);
    if (bytes > 0) ok(device().download(part.data(), data_ + at, bytes, beside()), "reading memory");
    return part;
  }

 private:
  size_t bytes_;
  std::byte* data_ = nullptr;
};

/// A guarded buffer of the host's on the device, as far past a line as there. Its memory grows, and serves the next one:
/// no kernel may use it then.
class Twin {
 public:
  /// All of it, with its guards; the buffer must stay where it is.
  void upload(reduce_reference::Buffer& host) {
    host_ = &host;
    const size_t bytes = host.storage.size() + kLine;
    if (!memory_ || memory_->size() < bytes) {
      memory_.reset();
      memory_ = std::make_unique<Memory>(bytes + bytes / 2);
    }
    memory_->fill(host.storage, shift());
  }
  void download() {
    const Bytes seen = memory_->read(shift(), host_->storage.size());
    std::copy(seen.begin(), seen.end(), host_->storage.begin());
  }
  bool holds(const std::byte* on_host) const {
    return on_host >= host_->storage.data() && on_host < host_->storage.data() + host_->storage.size();
  }
  std::byte* address(const std::byte* on_host) const {
    return memory_->data() + shift() + (on_host - host_->storage.data());
  }

 private:
  static constexpr size_t kLine = 256;
  size_t shift() const {
    return (reinterpret_cast<uintptr_t>(host_->storage.data()) - reinterpret_cast<uintptr_t>(memory_->data())) % kLine;
  }

  reduce_reference::Buffer* host_ = nullptr;
  std::unique_ptr<Memory> memory_;
};

/// Where the device has what lies at that address of the host in one of them; null where it lies in none.
template <class Twins>
std::byte* on_device(const Twins& twins, const std::byte* on_host) {
  for (const Twin& twin : twins) {
    if (twin.holds(on_host)) return twin.address(on_host);
  }
  return nullptr;
}

class Stream {
 public:
  static constexpr std::chrono::seconds kPatience{25};

  Stream() {
    ok(device().create_stream(&stream_), "making a stream");
    ok(device().create_event(&event_), "making an event");
  }
  ~Stream() {
    if (device_hangs) return;
    device().destroy_event(event_);
    device().destroy_stream(stream_);
  }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  void* get() const { return stream_; }

  /// False where the stream has not done by then what it was given.
  bool done_within(std::chrono::milliseconds limit) {
    ok(device().record(event_, stream_), "recording an event");
    const Deadline deadline = Deadline::after(limit);
    for (int done = 0;;) {
      ok(device().finished(event_, &done), "asking for an event");
      if (done != 0) return true;
      if (deadline.passed()) return false;
      std::this_thread::yield();
    }
  }
  void wait() {
    if (done_within(kPatience)) return;
    device_hangs = true;
    throw Timeout("a stream has not done after " + in_seconds(kPatience) + " what it was given; the device hangs");
  }

 private:
  void* stream_ = nullptr;
  void* event_ = nullptr;
};

/// Fills memory with `block`, again and again: copied on the device, since uploading it all would take seconds.
inline void repeat(Memory& memory, const Bytes& block, Stream& stream) {
  const size_t first = std::min(block.size(), memory.size());
  memory.fill({block.begin(), block.begin() + static_cast<std::ptrdiff_t>(first)});
  for (size_t filled = first; filled < memory.size();) {
    const size_t bytes = std::min(filled, memory.size() - filled);
    ok(device().copy(memory.data() + filled, memory.data(), bytes, stream.get()), "copying");
    filled += bytes;
  }
  stream.wait();
}

/// The bytes from `at` on of what repeat() makes of `block`.
inline Bytes repeated(const Bytes& block, size_t at, size_t bytes) {
  Bytes part(bytes);
  for (size_t done = 0; done < bytes;) {
    const size_t from = (at + done) % block.size(), some = std::min(bytes - done, block.size() - from);
    std::memcpy(part.data() + done, block.data() + from, some);
    done += some;
  }
  return part;
}

inline Bytes random_bytes(size_t bytes, std::mt19937_64& random) {
  Bytes all(bytes);
  for (std::byte& byte : all) byte = static_cast<std::byte>(random());
  return all;
}

/// Where memory is not what it must be: "" where it is.
inline std::string difference(const std::byte* seen, const std::byte* wanted, size_t bytes) {
  if (bytes == 0 || std::memcmp(seen, wanted, bytes) == 0) return "";
  const size_t first = static_cast<size_t>(std::mismatch(seen, seen + bytes, wanted).first - seen);
  size_t wrong = 0;
  for (size_t i = first; i < bytes; ++i) wrong += seen[i] != wanted[i];
  std::ostringstream text;
  text << wrong << " of " << bytes << " bytes differ, the first at " << first << ": " << std::hex;
  const auto put = [&](const std::byte* from) {
    for (size_t i = first; i < std::min(bytes, first + 8); ++i) text << std::to_integer<int>(from[i]) << " ";
  };
  put(seen);
  text << "instead of ";
  put(wanted);
  return text.str();
}

inline double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

inline double seconds(const std::function<void()>& act) {
  const auto start = std::chrono::steady_clock::now();
  act();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace gpu_check
