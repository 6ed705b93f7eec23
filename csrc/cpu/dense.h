// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Makes arrays dense for tasks that outlive the array handle.

#pragma once

#include <cstdint>
#include <vector>

#include "mlx/array.h"
#include "mlx/backend/cpu/encoder.h"

namespace mlx_paged::cpu {

namespace mx = mlx::core;

// Returns the array itself if its rows are dense, else a copy kept until the queued work is done.
mx::array dense(const mx::array& in, mx::cpu::CommandEncoder& encoder);

// Allocates `out` and queues a copy of `in` with any strides.
void copy_to_dense(const mx::array& in, mx::array& out, mx::cpu::CommandEncoder& encoder);

// Returns a primitive's inputs, those from `first` on made dense.
std::vector<mx::array> dense_inputs(
    const std::vector<mx::array>& in, size_t first, mx::cpu::CommandEncoder& encoder);

struct Pool {
  char* data;
  int num_blocks, block_size, num_kv_heads;
  int64_t token_bytes, head_bytes;  // average in a quantized pool

  explicit Pool(mx::array& a)
      : data(a.data<char>()),
        num_blocks(a.shape(0)),
        block_size(a.shape(1)),
        num_kv_heads(a.shape(2)),
        token_bytes(int64_t(a.shape(2)) * a.shape(3) * a.itemsize()),
        head_bytes(int64_t(a.shape(3)) * a.itemsize()) {}

  int64_t block_bytes() const { return block_size * token_bytes; }
  char* slot(int64_t s) const { return data + s * token_bytes; }
  char* block(int64_t b) const { return data + b * block_bytes(); }
};

// Makes `out` alias the pool `in`, or a counted copy if its layout prevents that.
void alias_or_copy_pool(const mx::array& in, mx::array& out, mx::cpu::CommandEncoder& encoder);

// Returns the pool itself if it is dense, else a counted copy kept until the queued work is done.
mx::array dense_pool(const mx::array& in, mx::cpu::CommandEncoder& encoder);

}  // namespace mlx_paged::cpu
