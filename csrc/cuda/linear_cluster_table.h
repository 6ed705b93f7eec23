// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Every instantiation of linear_cluster, once. X(...) receives the arguments given after it, then
// tiles of eight rows of x, warps of a block, and stages. Small blocks that fit a multiprocessor
// three times and more were fastest, whatever else they cost.

#pragma once

#define PAGED_FOR_EACH_LINEAR_CLUSTER(X, ...) \
  X(__VA_ARGS__, 4, 2, 3)                     \
  X(__VA_ARGS__, 8, 4, 3)
