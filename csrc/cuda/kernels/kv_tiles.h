// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Streams keys and values to a thread block through two tiles in shared memory: asynchronous copies
// fill one while all warps read the other.

#pragma once

#include "../tensor_shape.h"
#include "block_table.h"
#include "tensor_core.h"

namespace paged {

template <typename T, int DIM, int THREADS>
class KVTiles {
 public:
  static constexpr int TOKENS = PREFILL_TENSOR_TOKENS;
  static constexpr int ROW_CHUNKS = DIM / 8;  // 16-byte chunks
  static constexpr int ROWS_AT_ONCE = THREADS / ROW_CHUNKS;
  static constexpr int TILE = TOKENS * DIM * 2;  // bytes of keys, and of values
  // Blocks have at least 16 tokens and tiles start at multiples of 16, so a thread's rows within 16
  // tokens lie in one block.
  static constexpr int GROUP = 16 % ROWS_AT_ONCE == 0 ? 16 : ROWS_AT_ONCE;
  static constexpr int GROUPS = (TOKENS + GROUP - 1) / GROUP;

  // `first`: a multiple of 16. Tokens outside [seen.begin, seen.end) become zeros, because 0 x NaN
  // would reach the results.
  __device__ __forceinline__ KVTiles(
      const void* shared, const T* key_pool, const T* value_pool, BlockTable table, KeyRange seen,
      int num_kv_heads, int kv_head, int first)
      : shared_(shared_address(shared)),
        keys_(key_pool + kv_head * DIM + threadIdx.x % ROW_CHUNKS * 8),
        values_(value_pool + kv_head * DIM + threadIdx.x % ROW_CHUNKS * 8),
        table_(table),
        seen_(seen),
        pitch_(num_kv_heads * DIM),
        row_(threadIdx.x / ROW_CHUNKS),
        next_(first) {
    look_up();
    copy();
  }

  // Waits for the next tile and returns the address of its keys, which the values follow.
  // Invalidates the tile that the previous call returned.
  __device__ __forceinline__ unsigned int advance() {
    wait_for_copies<0>();
    __syncthreads();
    unsigned int tile = shared_ + (target_ ^ (2 * TILE));
    copy();
    return tile;
  }

 private:
  // Looks up the blocks of the next tile, one tile ahead of their use.
  __device__ __forceinline__ void look_up() {
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
      int token = next_ + g * GROUP + row_;
      blocks_[g] = token < seen_.end ? table_.blocks[token >> table_.shift] : 0;
    }
  }

  __device__ __forceinline__ void copy() {
    if (next_ < seen_.end) {
#pragma unroll
      for (int i = 0; i < TOKENS; i += ROWS_AT_ONCE) {
        int row = i + row_;
        if (TOKENS % ROWS_AT_ONCE == 0 || row < TOKENS) {
          int token = next_ + row;
          bool exists = token >= seen_.begin && token < seen_.end;
          int in_block = token & ((1 << table_.shift) - 1);
          size_t slot = (size_t(blocks_[i / GROUP]) << table_.shift) + in_block;
          // Default cache policy: other items of the sequence read it too.
          unsigned int to =
              shared_ + target_ + tile_offset<ROW_CHUNKS>(row, threadIdx.x % ROW_CHUNKS);
          copy_async(to, keys_ + slot * pitch_, exists);
          copy_async(to + TILE, values_ + slot * pitch_, exists);
        }
      }
    }
    commit_copies();
    next_ += TOKENS;
    target_ ^= 2 * TILE;
    look_up();
  }

  unsigned int shared_;
  const T* keys_;
  const T* values_;
  BlockTable table_;
  KeyRange seen_;
  int pitch_;
  int row_;
  int next_;  // first token of the next tile to copy
  int blocks_[GROUPS];
  int target_ = 0;  // offset of the tile to fill, in bytes
};

}  // namespace paged
