// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Keys and values on their way to one warp: a ring of tiles in shared memory, filled ahead by
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
  static constexpr int ROW_CHUNKS = DIM / 8;  // of 16 bytes
  static constexpr int ROWS_AT_ONCE = 32 / ROW_CHUNKS;
  static constexpr int TILE = TENSOR_TOKENS * DIM * 2;  // bytes of keys, and of values

  // `first` is the warp's first token, a multiple of 16, and `step` the way to its next tile.
  // Tokens that are not seen become zeros: 0 x NaN would reach the results. `seen_of()` looks at
  // memory to find them, so the blocks of the first tokens before `end` are looked up in parallel.
  // Waits for the kernel before, which may write keys and values. Where it `writes_last_only`, what
  // is seen but for the last token is on its way before that.
  template <typename Seen>
  __device__ __forceinline__ KVRing(
      const void* shared, const T* key_pool, const T* value_pool, BlockTable table, int end,
      Seen seen_of, bool writes_last_only, int num_kv_heads, int kv_head, int first, int step,
      int lane)
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
      if (writes_last_only && next_ + TENSOR_TOKENS < seen_.end) {
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

  // Waits for the next tile and returns the address of its keys; the values follow. What the call
  // before returned is overwritten from here on.
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

  // Where 16 bytes of a row lie in a tile.
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

  // The next tile, of keys and then of values. A block has at least 16 tokens, so a tile lies in
  // one. Past the end the group is empty.
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
  int next_;   // first token of the tile to copy next
  int block_;  // its block, looked up a tile ahead
  CachePolicy policy_;
  int current_ = 0;  // bytes into the ring: the tile to be read
  int target_ = 0;   // and the one to be filled
};

}  // namespace paged
