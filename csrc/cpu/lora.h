// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Low-rank adapters on the CPU: base + (x @ A.T) @ B with an adapter per row. A row's
// bits do not depend on other rows.

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

// Rows of one call: those with the same adapter share passes over its matrices.
constexpr int kMaxLoraRows = 64;

void add_lora(const LoraShape& shape, const LoraRow* rows, int num_rows);

}  // namespace mlx_paged::cpu
