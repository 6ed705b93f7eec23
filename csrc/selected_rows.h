// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Prunes rows of a prompt's last layer. Once K and V are written, only the sampled rows matter, but
// model code computes all of them.

#pragma once

#include <utility>
#include <vector>

#include "mlx/array.h"

namespace mlx_paged {

namespace mx = mlx::core;

// An array of all rows, and what the selected ones of it are.
using SelectedRows = std::pair<mx::array, mx::array>;

// `a[rows]`, where the first axis of `a` is the rows of a step: the operations that lead to it, as
// far back as each row depends on itself alone, are made again of the selected rows. Where the
// graph has been evaluated, or something of `kept` needs it, rows of its result are taken.
// rows: [num_selected] int32. known: where the first of a pair is met, the second one serves.
mx::array select_rows(
    const mx::array& a, const mx::array& rows, const std::vector<mx::array>& kept,
    const std::vector<SelectedRows>& known);

}  // namespace mlx_paged
