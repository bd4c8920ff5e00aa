// A butterfly needs a power of two. For any other world, the ranks in excess are folded into neighbours.
//
// With `size` the largest power of two <= world and `excess` = world - size, the first 2 excess ranks form pairs
// (0,1) (2,3) ... The even rank of a pair gives its input to the odd rank, sits out, and gets the result at the end.
// The odd ranks and all ranks from 2 excess on are the players, numbered 0 .. size-1 in the order of ranks.
//
//   world 6, size 4:   rank    0 1   2 3   4   5
//                      player    0     1   2   3
#pragma once

#include <bit>

#include "schedule/collective.h"
#include "schedule/step.h"

namespace ringlet {

struct Fold {
  explicit Fold(const RankInfo& info)
      : size(static_cast<int>(std::bit_floor(static_cast<unsigned>(info.world)))),
        excess(info.world - size),
        paired(info.rank < 2 * excess),
        sits_out(paired && info.rank % 2 == 0),
        partner(info.rank ^ 1),
        player(paired ? info.rank / 2 : info.rank - excess) {}

  int rank_of(int other_player) const { return other_player < excess ? 2 * other_player + 1 : other_player + excess; }

  /// The round in which a rank gives or takes an input; backwards the one in which the result goes back.
  void enter(Schedule& schedule) const {
    const Chunks all{0, schedule.parts};
    if (sits_out) schedule.round().send(partner, all);
    if (paired && !sits_out) schedule.round().reduce(partner, all);
  }

  /// The round in which the result goes back.
  void leave(Schedule& schedule) const {
    const Chunks all{0, schedule.parts};
    if (sits_out) schedule.round().recv(partner, all);
    if (paired && !sits_out) schedule.round().send(partner, all);
  }

  int size;     ///< players, a power of two
  int excess;   ///< ranks that sit out
  bool paired;  ///< this rank sits out or stands in for one that does
  bool sits_out;
  int partner;  ///< the other rank of the pair, if paired
  int player;   ///< this rank's number among the players, if it does not sit out
};

}  // namespace ringlet
