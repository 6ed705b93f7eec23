// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Low-rank adapters on the CPU: base + (x @ A.T) @ B with an adapter per row. Each row is
// computed alone, so its bits do not depend on other rows.

#pragma once

#include <cstdint>

#include "../primitives.h"

namespace mlx_paged::cpu {

struct LoraShape {
  int num_adapters;
  int rank;
  int k;
  int n;
  DType dtype;        // of A and B
  int64_t item_size;  // bytes
};

// in: the inputs of a Lora node.
LoraShape lora_shape(const Arrays& in);

struct LoraRow {
  const float* base;  // [n]
  const float* x;     // [k]
  int adapter;        // no adapter if outside of [0, num_adapters)
  const char* a;      // [num_adapters, rank, k]
  const char* b;      // [num_adapters, rank, n]
  float* out;         // [n]; may be base
};
void add_lora(const LoraShape& shape, const LoraRow& row);

}  // namespace mlx_paged::cpu
