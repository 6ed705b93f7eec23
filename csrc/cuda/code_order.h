// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// The order in which a product's lanes read the codes of a quantized weight, and so the order of
// x's columns that its kernel reads fastest. Plain C++ that nvcc reads too.

#pragma once

#include "../gpu/column_order.h"

namespace mlx_paged::cuda {

// Order of x for quantized products. Four lanes share each run of columns: each has a quarter, in
// pieces of eight adjacent columns, and columns of a piece that are a fixed distance apart form a
// pair. Ordered x has the first pieces of all lanes, then their second pieces; within these, the
// first pairs of all lanes, then the second pairs, and so on.
using CodeOrder = ColumnOrder;

// Place of pair `pair` among the eight columns from `column` on.
constexpr int index_of_pair(CodeOrder order, int column, int pair) {
  const int in_run = column & (order.run - 1);
  const bool has_two = order.run == 64;  // pieces per lane
  const int lane = has_two ? in_run / 16 : in_run / 8;
  const int piece = has_two ? in_run / 8 % 2 : 0;
  return column - in_run + 32 * piece + 8 * pair + 2 * lane;
}

// Place of a column.
constexpr int ordered_column(CodeOrder order, int column) {
  const int in_piece = column & 7;
  // One bit selects the element of a pair; the others select the pair.
  const int pair = (in_piece & (order.apart - 1)) | (in_piece / 2 & -order.apart);
  return index_of_pair(order, column - in_piece, pair) + ((in_piece & order.apart) != 0);
}

}  // namespace mlx_paged::cuda
