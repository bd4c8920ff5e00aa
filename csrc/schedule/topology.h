// The ranks of each host, and the two orders in which a schedule can go round the ranks.
//
//   host of rank 0 .. 5: a b c a a b     along   0 3 4 1 5 2     host after host: the next rank is mostly on this host
//                                        across  0 1 2 3 5 4     round robin over the hosts: it is mostly on another
//
// Hosts are numbered by their first rank; ranks on a host ascend. If all hosts have equally many ranks, `along` is the
// block numbering of the ranks, and `across` the cyclic one. Thread safety: immutable once made; spans live as long as
// it does.
#pragma once

#include <map>
#include <span>
#include <vector>

namespace ringlet {

struct RankInfo;

/// The hosts of the ranks, by whatever names, as numbers by first appearance.
template <typename Names>
std::vector<int> numbered_by_first_rank(const Names& names) {
  std::map<typename Names::value_type, int> numbers;
  std::vector<int> hosts;
  for (const auto& name : names)
    hosts.push_back(numbers.try_emplace(name, static_cast<int>(numbers.size())).first->second);
  return hosts;
}

/// The ranks in an order: position -> rank, and back.
struct Numbering {
  std::vector<int> rank_at;
  std::vector<int> position_of;
  bool identity = true;
};

class Topology {
 public:
  /// `host_of_rank`: any numbers, equal for ranks that share a host; at least one rank.
  explicit Topology(std::span<const int> host_of_rank);

  int world() const { return static_cast<int>(host_.size()); }
  int hosts() const { return static_cast<int>(first_.size()) - 1; }
  bool one_host() const { return hosts() == 1; }
  int fewest() const { return fewest_; }  ///< ranks on the host with the fewest

  int host(int rank) const { return host_[rank]; }
  int size(int host) const { return first_[host + 1] - first_[host]; }
  std::span<const int> ranks_on(int host) const { return {along_.rank_at.data() + first_[host], size_t(size(host))}; }
  int index_on_host(int rank) const { return along_.position_of[rank] - first_[host_[rank]]; }

  const Numbering& along() const { return along_; }
  const Numbering& across() const { return across_; }

 private:
  std::vector<int> host_;   // by rank
  std::vector<int> first_;  // by host, and one more: the position of its first rank in along_
  int fewest_;
  Numbering along_;
  Numbering across_;
};

/// info.topology; without one, all ranks on one host.
Topology topology_of(const RankInfo& info);

}  // namespace ringlet
