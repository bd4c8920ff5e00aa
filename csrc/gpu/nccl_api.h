// The functions of NCCL that ringlet uses, as a table: found at run time, so that one build serves machines with and
// without NCCL, and a test can put a NCCL of its own in its place.
//
// Contract: nccl_api() opens, once per process, the first of: the file that RINGLET_NCCL_LIBRARY names (and no other
// then); the NCCL that the process has loaded already, as torch does; the nvidia-nccl wheel beside this package; the
// system's. DeviceError where there is none, it is older than 2.17, or lacks a function; the next call looks again.
// Ownership: the library stays open for ever. Thread safety: nccl_api() from any thread; NCCL's own rules for the rest.
#pragma once

#include <climits>
#include <cstddef>
#include <string>
#include <vector>

namespace ringlet {

using NcclComm = struct ncclComm*;
using NcclStream = void*;  ///< a cudaStream_t

struct NcclUniqueId {
  char internal[128];
};

// Of ncclResult_t and ncclDataType_t, what is told apart here. What travels is bytes.
inline constexpr int kNcclSuccess = 0, kNcclRemoteError = 6, kNcclInProgress = 7;
inline constexpr int kNcclUint8 = 1;

/// ncclConfig_t as NCCL 2.17 had it: later ones begin with the same members, and read no further than `size`.
struct NcclConfig {
  size_t size = sizeof(NcclConfig);
  unsigned magic = 0xcafebeef;
  unsigned version = 21700;
  int blocking = 1;  ///< calls wait; 0 would make NCCL start a thread for every group
  int cga_cluster_size = INT_MIN;
  int min_ctas = INT_MIN;
  int max_ctas = INT_MIN;
  const char* net_name = nullptr;
};

struct NcclApi {
  static constexpr int kOldest = 21700;

  int version = 0;     ///< 22809 is 2.28.9
  std::string path{};  ///< where it was found

  int (*get_version)(int* version) = nullptr;
  int (*get_unique_id)(NcclUniqueId* id) = nullptr;
  int (*comm_init_rank_config)(NcclComm* comm, int world, NcclUniqueId id, int rank, NcclConfig* config) = nullptr;
  int (*comm_get_async_error)(NcclComm comm, int* result) = nullptr;
  int (*comm_finalize)(NcclComm comm) = nullptr;
  int (*comm_destroy)(NcclComm comm) = nullptr;
  int (*comm_abort)(NcclComm comm) = nullptr;
  int (*group_start)() = nullptr;
  int (*group_end)() = nullptr;
  int (*send)(const void* from, size_t count, int type, int peer, NcclComm comm, NcclStream stream) = nullptr;
  int (*recv)(void* to, size_t count, int type, int peer, NcclComm comm, NcclStream stream) = nullptr;
  int (*all_reduce)(const void* from, void* to, size_t count, int type, int op, NcclComm comm,
                    NcclStream stream) = nullptr;
  int (*reduce_scatter)(const void* from, void* to, size_t count, int type, int op, NcclComm comm,
                        NcclStream stream) = nullptr;
  int (*reduce)(const void* from, void* to, size_t count, int type, int op, int root, NcclComm comm,
                NcclStream stream) = nullptr;
  int (*all_gather)(const void* from, void* to, size_t count, int type, NcclComm comm, NcclStream stream) = nullptr;
  int (*broadcast)(const void* from, void* to, size_t count, int type, int root, NcclComm comm,
                   NcclStream stream) = nullptr;
  const char* (*get_error_string)(int result) = nullptr;
  const char* (*get_last_error)(NcclComm comm) = nullptr;

  std::string dotted() const;  ///< "2.28.9"
};

const NcclApi& nccl_api();

/// What nccl_api() tries, in order: a path, or a name for the loader to find.
struct NcclCandidate {
  std::string path;
  bool loaded_only = false;  ///< only if the process has it open already
};
std::vector<NcclCandidate> nccl_candidates();

/// Opens the first candidate that can be opened. An unfit one is an error: the next might be another version by chance.
NcclApi open_nccl(const std::vector<NcclCandidate>& candidates);

}  // namespace ringlet
