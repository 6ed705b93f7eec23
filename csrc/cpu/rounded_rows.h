// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// RoundedRows: the rounded rows of one input, kept for the products that follow. A layer multiplies
// the same input by several matrices, such as those of queries, keys and values.

#pragma once

#include <cstdint>

#include "../allocation.h"
#include "mlx/array.h"

namespace mlx_paged::cpu {

// Numbers the inputs of products, from 1. Consecutive calls of a thread for the same array return
// the same number while its evaluation runs.
uint64_t input_number(const mlx::core::array& x);

// Rows, and how they are rounded.
struct RoundedInput {
  uint64_t number = 0;  // see input_number; 0: no rows
  const float* x = nullptr;
  int rows = 0;
  int bits = 0;  // of the weights
  const void* kernels = nullptr;

  bool operator==(const RoundedInput&) const = default;
};

// Rows are rounded a block at a time, just before the first product reads them.
class RoundedRows {
 public:
  // Begins a product. Keeps the previous product's blocks if both have the same input.
  void begin(const RoundedInput& input, int num_blocks, int64_t block_bytes);

  // Memory of a block. If the input is too large to keep, all blocks share it.
  char* block(int i) const { return memory_ + i * stride_; }

  bool has(int block) const { return block < num_done_; }
  void set_done(int block) { num_done_ = block + 1; }

 private:
  Scratch scratch_;  // reused, so that its pages are not mapped anew for every product
  RoundedInput input_;
  char* memory_ = nullptr;
  int64_t stride_ = 0;
  int num_done_ = 0;  // blocks
};

}  // namespace mlx_paged::cpu
