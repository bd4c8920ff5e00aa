// Multicast memory of the host, for the kernels on it compiled for the host: a load-reduce adds what lies in all
// members' memory, a store goes to all of it. Nothing else reaches the object's address: it is mapped without access.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <mutex>
#include <set>

#include "cuda/cuda.h"
#include "cuda/reduce.h"

namespace emulated_multicast {

using namespace ringlet;

constexpr size_t kMost = 32;  // of members, and of objects' mappings at a time

/// Lasts as long as the process; the members' memory as long as somebody has the object.
struct Object {
  size_t devices = 0;
  std::set<int> joined{};
  std::array<std::atomic<std::byte*>, kMost> members{};
  std::atomic<size_t> mapped{0};
  int holders = 0;
};

struct Mapping {
  std::atomic<uintptr_t> begin{0};
  std::atomic<size_t> bytes{0};
  std::atomic<Object*> object{nullptr};
};

inline std::mutex
    mutex;  // guards the objects but for their atomics; kernels take no lock, which would order their words
/// Not destroyed at exit, where kernels of calls that were given up may still run.
inline std::deque<Object>& objects = *new std::deque<Object>;
inline std::array<Mapping, kMost> mappings;

struct Place {
  const Object* object;
  size_t offset;
};

/// Ends the process where the address is no object's.
inline Place find(const std::byte* at) {
  const auto address = reinterpret_cast<uintptr_t>(at);
  for (const Mapping& mapping : mappings) {
    const uintptr_t begin = mapping.begin.load(std::memory_order_acquire);
    if (begin == 0 || address < begin || address - begin >= mapping.bytes) continue;
    return {mapping.object, address - begin};
  }
  std::abort();
}

template <class E>
cuda::Pack load_sum(const std::byte* at) {
  const Place place = find(at);
  if (place.offset % cuda::kPackBytes != 0) std::abort();
  cuda::Values<E, cuda::Sum, cuda::kPerPack<E>> sum;
  for (size_t i = place.object->devices; i-- > 0;) {  // in no order that anybody may count on
    const auto* member = reinterpret_cast<const cuda::Pack*>(place.object->members[i].load() + place.offset);
    cuda::Values<E, cuda::Sum, cuda::kPerPack<E>> next;
    next.unpack(*member);
    if (i + 1 == place.object->devices) {
      sum = next;
    } else {
      sum.combine(next);
    }
  }
  cuda::Pack pack;
  sum.pack(pack);
  return pack;
}

inline void store_for_all(std::byte* at, const cuda::Pack& pack) {
  const Place place = find(at);
  if (place.offset % cuda::kPackBytes != 0) std::abort();
  for (size_t i = 0; i < place.object->devices; ++i) {
    *reinterpret_cast<cuda::Pack*>(place.object->members[i].load() + place.offset) = pack;
  }
}

/// The object that a rank has; 0: none.
inline Object& object_of(const RingletCudaMulticast& multicast) { return objects.at(multicast.object - 1); }

/// Its number is in the file.
inline int make(RingletCudaMulticast* multicast, int* descriptor) {
  const std::lock_guard lock(mutex);
  objects.emplace_back().devices = static_cast<size_t>(multicast->devices);
  multicast->object = objects.size();
  ++object_of(*multicast).holders;
  *descriptor = ::memfd_create("multicast", MFD_CLOEXEC);
  return ::write(*descriptor, &multicast->object, sizeof multicast->object) != sizeof multicast->object;
}

inline int take(RingletCudaMulticast* multicast, int descriptor) {
  const std::lock_guard lock(mutex);
  if (::pread(descriptor, &multicast->object, sizeof multicast->object, 0) != sizeof multicast->object) return 1;
  return ++object_of(*multicast).holders, 0;
}

/// No device twice.
inline int join(RingletCudaMulticast* multicast, int device) {
  const std::lock_guard lock(mutex);
  return object_of(*multicast).joined.insert(device).second ? 0 : 1;
}

/// Not before all have joined.
inline int map(RingletCudaMulticast* multicast) {
  const std::lock_guard lock(mutex);
  Object& object = object_of(*multicast);
  if (object.joined.size() != object.devices) return 1;
  multicast->bytes = (multicast->bytes + 4095) / 4096 * 4096;
  multicast->own = std::aligned_alloc(4096, multicast->bytes);
  multicast->all = ::mmap(nullptr, multicast->bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  object.members[object.mapped++] = static_cast<std::byte*>(multicast->own);
  for (Mapping& mapping : mappings) {
    if (mapping.begin != 0) continue;
    mapping.bytes = multicast->bytes;
    mapping.object = &object;
    mapping.begin.store(reinterpret_cast<uintptr_t>(multicast->all), std::memory_order_release);
    return 0;
  }
  return 1;
}

inline int release(RingletCudaMulticast* multicast) {
  const std::lock_guard lock(mutex);
  Object& object = object_of(*multicast);
  for (Mapping& mapping : mappings) {
    if (multicast->all != nullptr && mapping.begin == reinterpret_cast<uintptr_t>(multicast->all)) mapping.begin = 0;
  }
  if (multicast->all != nullptr) ::munmap(multicast->all, multicast->bytes);
  if (--object.holders == 0) {
    for (auto& member : object.members) std::free(member.exchange(nullptr));
  }
  *multicast = {};
  return 0;
}

/// How many objects somebody has.
inline int alive() {
  const std::lock_guard lock(mutex);
  int count = 0;
  for (const Object& object : objects) count += object.holders > 0 ? 1 : 0;
  return count;
}

}  // namespace emulated_multicast
