#include "engine/message/message_plan.h"

#include <algorithm>
#include <map>

#include "engine/plan_inputs.h"

namespace ringlet {
namespace {

bool touches(const Step& step, int first, int count) {
  const auto overlaps = [&](int begin) { return begin < first + count && first < begin + step.count; };
  return overlaps(step.first) || (step.verb == Verb::copy && overlaps(step.peer));
}

bool is_copy(const ChunkUpdate& one) { return one.parts.size() == 1 && one.parts[0].message == ChunkUpdate::kOwn; }

class MessagePlanner {
 public:
  MessagePlanner(const PlanInputs& inputs, int rank) : inputs_(inputs), rank_(rank), schedule_(inputs.schedules[rank]) {
    plan_.parts = schedule_.parts;
    plan_.input = inputs.inputs[rank];
    plan_.output = inputs.outputs[rank];
    for (const Schedule& schedule : inputs.schedules) plan_.most_held = std::max(plan_.most_held, held(schedule));
  }

  MessagePlan make() {
    for (int r = 0; r < static_cast<int>(schedule_.rounds.size()); ++r) plan_round(r);
    std::sort(plan_.peers.begin(), plan_.peers.end());
    plan_.peers.erase(std::unique(plan_.peers.begin(), plan_.peers.end()), plan_.peers.end());
    return std::move(plan_);
  }

 private:
  /// Chunks that a segment may hold on that rank.
  static int held(const Schedule& schedule) {
    int held = schedule.parts;
    for (const Round& round : schedule.rounds) {
      for (const Step& step : round.steps) {
        if (step.verb == Verb::recv || step.verb == Verb::reduce) held += step.count;
      }
    }
    return held;
  }

  void plan_round(int r) {
    MessageRound round;
    round.first_sent = static_cast<int>(plan_.sent.size());
    round.first_received = static_cast<int>(plan_.received.size());
    for (const Step& step : schedule_.rounds[r].steps) {
      if (step.verb == Verb::copy) {
        for (int i = 0; i < step.count; ++i) update(round, step.peer + i).parts.push_back({-1, step.first + i});
        continue;
      }
      plan_.peers.push_back(step.peer);
      plan_.most_chunks = std::max(plan_.most_chunks, step.count);
      if (step.verb == Verb::send) {
        const bool last = r + 1 == static_cast<int>(schedule_.rounds.size());
        plan_.sent.push_back(
            {step.peer, sent_to_[step.peer]++, step.first, step.count, reduced_by_peer(step, r), last});
      } else {
        receive(round, r, step);
      }
    }
    round.sent = static_cast<int>(plan_.sent.size()) - round.first_sent;
    round.received = static_cast<int>(plan_.received.size()) - round.first_received;
    for (ChunkUpdate& one : round.updates) {
      order(one, r);
      mark_overwritten(round, one.chunk);
      plan_.works |= !plan_.output.contains(one.chunk);
    }
    // Copies read the values from before the round.
    std::stable_partition(round.updates.begin(), round.updates.end(),
                          [](const ChunkUpdate& one) { return is_copy(one); });
    plan_.rounds.push_back(std::move(round));
  }

  void receive(MessageRound& round, int r, const Step& step) {
    const int message = static_cast<int>(plan_.received.size());
    auto& from = plan_.from[step.peer];
    const bool reduces = step.verb == Verb::reduce;
    plan_.received.push_back({step.peer, static_cast<uint32_t>(from.size()), step.first, step.count, r, reduces,
                              plan_.all_received, reduces ? r + 1 : direct_from(step, r)});
    plan_.all_received += step.count;
    from.push_back(message);
    for (int i = 0; i < step.count; ++i) update(round, step.first + i).parts.push_back({message, i});
  }

  bool reduced_by_peer(const Step& step, int r) const {
    const Match& match = inputs_.matches[rank_][r][&step - schedule_.rounds[r].steps.data()];
    const std::vector<Step>& theirs = inputs_.schedules[step.peer].rounds[match.peer_round].steps;
    return std::any_of(theirs.begin(), theirs.end(), [&](const Step& each) {
      return each.verb == Verb::reduce && each.peer == rank_ && each.first == match.peer_first;
    });
  }

  void mark_overwritten(const MessageRound& round, int chunk) {
    for (int m = round.first_sent; m < round.first_sent + round.sent; ++m) {
      SentMessage& sent = plan_.sent[m];
      sent.overwritten = sent.overwritten || Chunks{sent.first, sent.count}.contains(chunk);
    }
  }

  int direct_from(const Step& step, int r) const {
    for (const Step& other : schedule_.rounds[r].steps) {
      if (other.verb == Verb::copy && touches(other, step.first, step.count)) return r + 1;
    }
    for (int before = r; before > 0; --before) {
      for (const Step& other : schedule_.rounds[before - 1].steps) {
        if (touches(other, step.first, step.count)) return before;
      }
    }
    return 0;
  }

  static ChunkUpdate& update(MessageRound& round, int chunk) {
    for (ChunkUpdate& one : round.updates) {
      if (one.chunk == chunk) return one;
    }
    return round.updates.emplace_back(ChunkUpdate{chunk, false, {}});
  }

  /// Sorts the parts by rank. In a reduction, this rank's own value takes this rank's place.
  void order(ChunkUpdate& one, int r) {
    if (is_copy(one) || !plan_.received[one.parts[0].message].reduces) return;
    one.parts.push_back({ChunkUpdate::kOwn, one.chunk});
    std::stable_sort(one.parts.begin(), one.parts.end(),
                     [&](const auto& a, const auto& b) { return rank(a) < rank(b); });
    one.finish = inputs_.complete(rank_, r, one.chunk);
    plan_.most_parts = std::max(plan_.most_parts, static_cast<int>(one.parts.size()));
  }

  int rank(const ChunkUpdate::Part& part) const {
    return part.message == ChunkUpdate::kOwn ? rank_ : plan_.received[part.message].peer;
  }

  const PlanInputs& inputs_;
  const int rank_;
  const Schedule& schedule_;
  std::map<int, uint32_t> sent_to_;
  MessagePlan plan_;
};

}  // namespace

MessagePlan make_message_plan(const Algorithm& algorithm, const RankInfo& info) {
  const PlanInputs inputs(algorithm, info);
  return MessagePlanner(inputs, info.rank).make();
}

}  // namespace ringlet
