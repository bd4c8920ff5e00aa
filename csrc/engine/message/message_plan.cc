#include "engine/message/message_plan.h"

#include <algorithm>

namespace ringlet {
namespace {

/// Chunks that a segment may hold on that rank.
int held(const RankSchedule& schedule) {
  int held = schedule.parts;
  for (const Step& step : schedule.steps) held += receives(step) ? step.count : 0;
  return held;
}

}  // namespace

MessagePlan make_message_plan(const Algorithm& algorithm, const RankInfo& info) {
  const Schedules schedules(algorithm, info);
  MessagePlan plan;
  static_cast<Plan&>(plan) = lower(schedules, info.rank, Reach::messages);
  for (int q = 0; q < info.world; ++q) plan.most_held = std::max(plan.most_held, held(schedules[q]));
  for (const std::vector<Transfer>* messages : {&plan.sent, &plan.received}) {
    for (const Transfer& message : *messages) {
      plan.peers.push_back(message.peer);
      plan.most_chunks = std::max(plan.most_chunks, message.count);
    }
  }
  std::sort(plan.peers.begin(), plan.peers.end());
  plan.peers.erase(std::unique(plan.peers.begin(), plan.peers.end()), plan.peers.end());
  for (size_t m = 0; m < plan.received.size(); ++m) plan.from[plan.received[m].peer].push_back(static_cast<int>(m));
  plan.works =
      std::any_of(plan.combines.begin(), plan.combines.end(), [](const Combine& one) { return one.to == Home::work; });
  return plan;
}

}  // namespace ringlet
