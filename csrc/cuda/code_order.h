// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// The order in which the lanes of a product get the codes of a quantised weight, and in which its
// kernel wants the columns of x. Plain C++: nvcc reads it too.

#pragma once

#include "../gpu/column_order.h"

namespace mlx_paged::cuda {

// Order of x for quantised products. Four lanes share each run of columns: each has a quarter, in
// pieces of eight adjacent columns, and columns of a piece that are a fixed distance apart form a
// pair. Ordered x has the first pieces of all lanes, then the second ones; within these the first
// pairs of all lanes, then the second ones.
using CodeOrder = ColumnOrder;

// Where pair `pair` of the eight columns from `column` on goes.
constexpr int place_of_pair(CodeOrder order, int column, int pair) {
  const int in_run = column & (order.run - 1);
  const bool has_two = order.run == 64;  // pieces of a lane
  const int lane = has_two ? in_run / 16 : in_run / 8;
  const int piece = has_two ? in_run / 8 % 2 : 0;
  return column - in_run + 32 * piece + 8 * pair + 2 * lane;
}

// Where a column goes.
constexpr int ordered_column(CodeOrder order, int column) {
  const int in_piece = column & 7;
  // One bit says which of a pair a column is, the others which pair it is of.
  const int pair = (in_piece & (order.apart - 1)) | (in_piece / 2 & -order.apart);
  return place_of_pair(order, column - in_piece, pair) + ((in_piece & order.apart) != 0);
}

}  // namespace mlx_paged::cuda
