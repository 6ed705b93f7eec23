// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Every instantiation of paged_decode_tensor, once: the .cu file expands the list, and the host
// chooses from it. X(...) receives the arguments given after it, a head dim and the tiles of 8
// queries. A second tile at head dim 256 would not fit the registers.

#pragma once

#define PAGED_FOR_EACH_TENSOR(X, ...) \
  X(__VA_ARGS__, 64, 1)               \
  X(__VA_ARGS__, 64, 2)               \
  X(__VA_ARGS__, 128, 1)              \
  X(__VA_ARGS__, 128, 2)              \
  X(__VA_ARGS__, 256, 1)
