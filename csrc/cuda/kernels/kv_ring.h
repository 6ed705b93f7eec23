// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Streams keys and values to one warp through a ring of tiles in shared memory, filled ahead by
// asynchronous copies. A warp waits only for its own copies.

#pragma once

#include "../tensor_shape.h"
#include "block_table.h"
#include "dependent_launch.h"
#include "tensor_core.h"

namespace paged {

template <typename T, int DIM>
class KVRing {
 public:
  static constexpr int STAGES = tensor_stages(DIM);
  static constexpr int ROW_CHUNKS = DIM / 8;  // 16-byte chunks
  static constexpr int ROWS_AT_ONCE = 32 / ROW_CHUNKS;
  static constexpr int TILE = TENSOR_TOKENS * DIM * 2;  // bytes of keys, and of values

  // `first`: the warp's first token, a multiple of 16; `step`: distance to its next tile. Tokens
  // that are not visible become zeros, because 0 x NaN would reach the results. `seen_of()` reads
  // memory to find the visible range, so the blocks of the first tokens before `end` are looked up
  // in parallel. Waits for the previous kernel, which may write the last `num_written` visible
  // keys and values. Copies of tiles before those start before that wait.
  template <typename Seen>
  __device__ __forceinline__ KVRing(
      const void* shared, const T* key_pool, const T* value_pool, BlockTable table, int end,
      Seen seen_of, int num_written, int num_kv_heads, int kv_head, int first, int step, int lane)
      : shared_(shared_address(shared)),
        keys_(key_pool + kv_head * DIM + lane % ROW_CHUNKS * 8),
        values_(value_pool + kv_head * DIM + lane % ROW_CHUNKS * 8),
        table_(table),
        end_(end),
        pitch_(num_kv_heads * DIM),
        step_(step),
        row_(lane / ROW_CHUNKS),
        next_(first),
        policy_(evict_first()) {
    int blocks[STAGES - 1];
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++) {
      blocks[s] = block_of(first + s * step);
    }
    block_ = block_of(first + (STAGES - 1) * step);
    seen_ = seen_of();
    int copied = 0;
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++) {
      if (next_ + TENSOR_TOKENS <= seen_.end - num_written) {
        copy(blocks[s], lane);
        copied = s + 1;
      }
    }
    wait_for_kernel_before();
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++) {
      if (s >= copied) {
        copy(blocks[s], lane);
      }
    }
  }

  __device__ __forceinline__ KeyRange seen() const { return seen_; }

  // Waits for the next tile and returns the address of its keys, which the values follow.
  // Invalidates the tile that the previous call returned.
  __device__ __forceinline__ unsigned int advance(int lane) {
    wait_for_copies<STAGES - 2>();
    __syncwarp();
    int block = block_;
    block_ = block_of(next_ + step_);
    copy(block, lane);
    unsigned int tile = shared_ + current_;
    current_ = following(current_);
    return tile;
  }

  // Offset of a 16-byte chunk of a row in a tile.
  __device__ __forceinline__ static unsigned int offset(int row, int chunk) {
    return tile_offset<ROW_CHUNKS>(row, chunk);
  }

 private:
  __device__ __forceinline__ static int following(int stage) {
    return stage + 2 * TILE == STAGES * 2 * TILE ? 0 : stage + 2 * TILE;
  }

  __device__ __forceinline__ int block_of(int token) const {
    return token < end_ ? table_.blocks[token >> table_.shift] : 0;
  }

  // Copies the next tile, keys and then values. Blocks have at least 16 tokens, so a tile lies in
  // one. Past the end it commits an empty group.
  __device__ __forceinline__ void copy(int block, int lane) {
    if (next_ < seen_.end) {
      int in_block = next_ & ((1 << table_.shift) - 1);
      size_t first = ((size_t(block) << table_.shift) + in_block + row_) * pitch_;
      copy_rows(shared_ + target_, keys_ + first, lane);
      copy_rows(shared_ + target_ + TILE, values_ + first, lane);
    }
    commit_copies();
    next_ += step_;
    target_ = following(target_);
  }

  __device__ __forceinline__ void copy_rows(unsigned int tile, const T* from, int lane) const {
#pragma unroll
    for (int i = 0; i < TENSOR_TOKENS; i += ROWS_AT_ONCE) {
      int token = next_ + i + row_;
      bool exists = token >= seen_.begin && token < seen_.end;
      unsigned int to = tile + offset(i + row_, lane % ROW_CHUNKS);
      copy_async(to, from + size_t(i) * pitch_, exists, policy_);
    }
  }

  unsigned int shared_;
  const T* keys_;
  const T* values_;
  BlockTable table_;
  int end_;
  KeyRange seen_;
  int pitch_;
  int step_;
  int row_;
  int next_;   // first token of the next tile to copy
  int block_;  // its block, looked up one tile ahead
  CachePolicy policy_;
  int current_ = 0;  // offset of the tile to read, in bytes
  int target_ = 0;   // offset of the tile to fill
};

}  // namespace paged
