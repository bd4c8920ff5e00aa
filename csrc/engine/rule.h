// The rules of `auto`, as text that people read and edit: one rule a line. The first rule that fits is used.
//
//   all_reduce  above 4KiB  up to 32KiB  world 2-4  network  one_shot    # a comment
//
// The collective is first, the algorithm last. Between them are conditions in any order; no condition means always.
// There are sizes of the schedule's whole buffer (B, KiB, MiB, GiB), worlds (4, 2-4, or 5- without an end), and media:
//   memory      they read each other's memory      network   some reach each other over a network only
//   registered  ... in tensors that are registered  hosts     ... and some share a host
//   staged      ... through staging buffers                  apart     ... and none do
//   peers       a GPU's kernel reads other GPUs'    nccl      NCCL carries messages between GPUs
// With `gpus` a rule says how calls on GPUs go if a group has both ways: its last word is `peers` or `nccl`. A line
// that begins with "tuned" is a size of the pull engine (engine/tuning.h). Pure values. Thread safety: any.
#pragma once

#include <cstddef>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include "engine/tuning.h"
#include "schedule/registry.h"

namespace ringlet {

/// What moves a message: the host, a kernel that reads peers' GPU memory, or NCCL.
enum class Way : unsigned char { host, peers, nccl };

/// What a rule depends on: the same on every rank.
struct Situation {
  Collective collective;
  size_t bytes;  ///< of the schedule's whole buffer
  int world;
  bool in_place;         ///< all ranks' tensors are registered, and the message is large enough to be read in place
  bool network = false;  ///< some ranks reach each other over a network only
  bool shared_hosts = false;  ///< some of them share a host
  Way way = Way::host;
  bool nccls_own = false;  ///< NCCL itself has this collective; if not, rules that name it do not match
};

enum class Medium : unsigned char { anything, memory, registered, staged, network, hosts, apart, peers, nccl, gpus };

struct Rule {
  Collective collective;
  const Algorithm* algorithm = nullptr;  ///< null: the rule says which way
  Way way = Way::host;
  size_t least_bytes = 0, most_bytes = std::numeric_limits<size_t>::max();
  int least_world = 1, most_world = std::numeric_limits<int>::max();
  Medium medium = Medium::anything;
  std::string source{};  ///< "the built-in rules: all_reduce network ring"

  bool in_range(Collective which, size_t bytes, int world) const noexcept;
  bool fits(const Situation& situation) const noexcept;
};

struct Table {
  std::vector<Rule> rules;
  Tuning tuning;
};

/// `processor`: rank 0's (base/processor.h). Throws InvalidUsage that names `origin`, the line and what is wrong with it.
Table parse_table(std::string_view table, const std::string& origin, std::string_view processor);

}  // namespace ringlet
