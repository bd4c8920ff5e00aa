// The 2-D torus all-reduce: ranks in rows and columns, `columns` being the largest divisor of the world up to its square
// root. Rings along the rows scatter sums, rings along the columns all-reduce what each column has, and rings along the
// rows gather.
//
//   world 6    0 1     rows: the ring's reduce-scatter among 0 1, among 2 3, among 4 5; column j has shard j
//              2 3     columns: the ring's all-reduce of shard 0 among 0 2 4, of shard 1 among 1 3 5
//              4 5     rows: the ring's all-gather
//
// With r rows and c columns, rounds: 2(c-1) + 2(r-1); in a prime world the ring's 2(world-1). Bytes sent per rank:
// 2S (world-1)/world. Sums: chains of c-1 and then r-1 additions, which start at a rank of their own for each chunk.
// Source: Mikami et al., "Massively Distributed SGD: ImageNet/ResNet-50 Training in a Flash", arXiv 1811.05233; Jain and
// Sabharwal, "Optimal Bucket Algorithms for Large MPI Collectives on Torus Interconnects", ICS 2010.
#include "schedule/algorithms.h"
#include "schedule/compose.h"

namespace ringlet {
namespace {

int columns_of(int world) {
  int columns = 1;
  for (int divisor = 2; divisor * divisor <= world; ++divisor) {
    if (world % divisor == 0) columns = divisor;
  }
  return columns;
}

}  // namespace

Schedule torus_all_reduce(const RankInfo& info) {
  const int columns = columns_of(info.world), rows = info.world / columns;
  const int row = info.rank / columns, column = info.rank % columns;
  const auto in_row = [&](int j) { return row * columns + j; };
  const auto in_column = [&](int i) { return i * columns + column; };
  Schedule schedule(info.world);
  append_among(schedule, ring_reduce_scatter({column, columns}), in_row, 0, rows);
  append_among(schedule, ring_all_reduce({row, rows}), in_column, column * rows, 1);
  append_among(schedule, ring_all_gather({column, columns}), in_row, 0, rows);
  return schedule;
}

}  // namespace ringlet
