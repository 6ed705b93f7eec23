// Copyright © 2026 the mlx_paged authors. Apache-2.0.

#pragma once

namespace paged {

// Of merge_splits.
enum {
  MERGE_HEADS = 4,     // query heads of a thread block, a warp each
  MERGE_VECTORS = 12,  // of four values of splits, that a lane has under way
};

}  // namespace paged
