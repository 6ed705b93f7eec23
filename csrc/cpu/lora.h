// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Low-rank adapters on the CPU: (x @ A.T) @ B is added to rows, with an adapter per row. A row's
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

struct LoraRows {
  LoraShape shape;
  const char* a;            // [num_adapters, rank, k]
  const char* b;            // [num_adapters, rank, n]
  const int32_t* adapters;  // [num_rows]; no adapter if outside of [0, num_adapters)
  int64_t num_rows;
  float* hidden;  // [num_rows, rank]; unused in rows without an adapter

  LoraRows part(int64_t begin, int64_t end) const {
    LoraRows rows = *this;
    rows.adapters += begin;
    rows.hidden += begin * shape.rank;
    rows.num_rows = end - begin;
    return rows;
  }
};

// Computes columns [begin, end) of hidden = x @ A.T. Neighbors with one adapter share reads of A.
void lora_down(const LoraRows& rows, const float* x, int64_t x_stride, int begin, int end);

// Adds columns [begin, end) of hidden @ B to `out`, [num_rows, end - begin] with rows out_stride
// apart. Neighbors with one adapter share reads of B. Rows without an adapter keep their bits.
void lora_up(const LoraRows& rows, float* out, int64_t out_stride, int begin, int end);

// Requests what lora_up reads first, for a caller that has other work to do meanwhile.
void fetch_lora_up(const LoraRows& rows, int begin, int end);

}  // namespace mlx_paged::cpu
