#include "schedule/topology.h"

#include <algorithm>
#include <utility>

#include "schedule/collective.h"

namespace ringlet {
namespace {

Numbering numbering(std::vector<int> rank_at) {
  Numbering made{std::move(rank_at), {}, true};
  made.position_of.resize(made.rank_at.size());
  for (int position = 0; position < static_cast<int>(made.rank_at.size()); ++position) {
    made.position_of[made.rank_at[position]] = position;
    made.identity = made.identity && made.rank_at[position] == position;
  }
  return made;
}

}  // namespace

Topology::Topology(std::span<const int> host_of_rank) : host_(numbered_by_first_rank(host_of_rank)) {
  std::vector<std::vector<int>> ranks(1 + *std::max_element(host_.begin(), host_.end()));
  for (int rank = 0; rank < world(); ++rank) ranks[host_[rank]].push_back(rank);
  std::vector<int> along, across;
  size_t fewest = host_.size(), most = 0;
  for (const std::vector<int>& here : ranks) {
    first_.push_back(static_cast<int>(along.size()));
    along.insert(along.end(), here.begin(), here.end());
    fewest = std::min(fewest, here.size());
    most = std::max(most, here.size());
  }
  first_.push_back(world());
  for (size_t index = 0; index < most; ++index) {
    for (const std::vector<int>& here : ranks) {
      if (index < here.size()) across.push_back(here[index]);
    }
  }
  fewest_ = static_cast<int>(fewest);
  along_ = numbering(std::move(along));
  across_ = numbering(std::move(across));
}

Topology topology_of(const RankInfo& info) {
  if (info.topology != nullptr) return *info.topology;
  return Topology(std::vector<int>(info.world, 0));
}

}  // namespace ringlet
