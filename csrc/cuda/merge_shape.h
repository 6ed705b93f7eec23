// Copyright © 2026 the mlx_paged authors. Apache-2.0.

#pragma once

namespace paged {

// Of merge_splits.
enum {
  MERGE_WARPS = 2,    // of a thread block
  MERGE_AT_ONCE = 4,  // splits of which a warp has the values under way
};

}  // namespace paged
