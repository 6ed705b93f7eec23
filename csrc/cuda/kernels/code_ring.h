// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// A ring of tiles in shared memory that streams codes and scales of quantized pools to one warp,
// like kv_ring.h for 16-bit pools. A tile of 32 tokens can span two blocks.

#pragma once

#include "../tensor_shape.h"
#include "block_table.h"
#include "tensor_core.h"

namespace paged {

// The keys or the values of a tile: one row of codes per token, then each token's scales.
template <int FORMAT, int DIM>
class CodeRows {
 public:
  static constexpr int ROW = code_bytes(FORMAT, DIM);
  static constexpr int TAIL = tail_bytes(FORMAT, DIM);
  static constexpr int CHUNKS = ROW / 16;      // 16-byte chunks
  static constexpr int AT_ONCE = 32 / CHUNKS;  // rows that a warp copies at once
  static constexpr int SCALES = QUANTIZED_TOKENS * ROW;
  static constexpr int BYTES = quantized_rows_bytes(FORMAT, DIM);
  static_assert(AT_ONCE <= 16 && TAIL <= 16, "the lanes do for a tile's scales");

  __device__ __forceinline__
  CodeRows(const unsigned char* pool, int shift, int heads, int head, int lane)
      : codes_(pool + (lane / CHUNKS * heads + head) * ROW + lane % CHUNKS * 16),
        scales_(pool + ((size_t(heads) << shift) * ROW) + (size_t(head) << shift) * TAIL),
        block_bytes_((size_t(heads) << shift) * (ROW + TAIL)),
        pitch_(heads * ROW) {}

  // Offset of a 16-byte chunk in a tile. Chunks of eight rows fall into different banks.
  __device__ __forceinline__ static int offset(int row, int chunk) {
    return (row * CHUNKS + (chunk ^ (row / (8 / CHUNKS) % CHUNKS))) * 16;
  }

  // Copies tokens [16 i, 16 i + 16) from blocks[i], starting at token in_block[i]. Tokens outside
  // the visible range become zeros.
  template <typename Exists>
  __device__ __forceinline__ void copy(
      unsigned int tile, const int (&blocks)[2], const int (&in_block)[2], Exists exists,
      CachePolicy policy, int lane) const {
    const unsigned char* from[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
      from[i] = codes_ + blocks[i] * block_bytes_ + in_block[i] * pitch_;
    }
#pragma unroll
    for (int row = 0; row < QUANTIZED_TOKENS; row += AT_ONCE) {
      int own = row + lane / CHUNKS;
      copy_async(
          tile + offset(own, lane % CHUNKS), from[row / 16] + row % 16 * pitch_, exists(own),
          policy);
    }
    if (TAIL > 0 && lane < 2 * TAIL) {  // 16 tokens have TAIL chunks
      int half = lane / (TAIL + (TAIL == 0));
      int chunk = lane - half * TAIL;
      size_t block = (half ? blocks[1] : blocks[0]) * block_bytes_;
      int first = half ? in_block[1] : in_block[0];
      copy_async(
          tile + SCALES + lane * 16, scales_ + block + first * TAIL + chunk * 16, true, policy);
    }
  }

 private:
  const unsigned char* codes_;  // this lane's 16 bytes of the first rows copied at once
  const unsigned char* scales_;
  size_t block_bytes_;
  int pitch_;
};

template <int KEYS, int VALUES, int DIM>
class CodeRing {
 public:
  typedef CodeRows<KEYS, DIM> Keys;
  typedef CodeRows<VALUES, DIM> Values;
  static constexpr int TILE = Keys::BYTES + Values::BYTES;
  static constexpr int STAGES = quantized_stages(TILE);

  // Same arguments as KVRing. `first` is a multiple of 32.
  template <typename Seen>
  __device__ __forceinline__ CodeRing(
      const void* shared, const unsigned char* key_pool, const unsigned char* value_pool,
      BlockTable table, int end, Seen seen_of, int num_kv_heads, int kv_head, int first, int step,
      int lane)
      : shared_(shared_address(shared)),
        keys_(key_pool, table.shift, num_kv_heads, kv_head, lane),
        values_(value_pool, table.shift, num_kv_heads, kv_head, lane),
        table_(table),
        end_(end),
        step_(step),
        next_(first),
        policy_(evict_first()) {
    int blocks[STAGES - 1][2];
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++) {
      look_up(blocks[s], first + s * step);
    }
    look_up(blocks_, first + (STAGES - 1) * step);
    seen_ = seen_of();
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++) {
      copy(blocks[s], lane);
    }
  }

  __device__ __forceinline__ KeyRange seen() const { return seen_; }

  // Waits for the next tile and returns the address of its keys, which the values follow.
  // Invalidates the tile that the previous call returned.
  __device__ __forceinline__ unsigned int advance(int lane) {
    wait_for_copies<STAGES - 2>();
    __syncwarp();
    int blocks[2] = {blocks_[0], blocks_[1]};
    look_up(blocks_, next_ + step_);
    copy(blocks, lane);
    unsigned int tile = shared_ + current_;
    current_ = following(current_);
    return tile;
  }

 private:
  __device__ __forceinline__ static int following(int stage) {
    return stage + TILE == STAGES * TILE ? 0 : stage + TILE;
  }

  __device__ __forceinline__ void look_up(int (&blocks)[2], int token) const {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      blocks[i] = token + 16 * i < end_ ? table_.blocks[(token + 16 * i) >> table_.shift] : 0;
    }
  }

  __device__ __forceinline__ void copy(const int (&blocks)[2], int lane) {
    if (next_ < seen_.end) {
      int mask = (1 << table_.shift) - 1;
      int in_block[2] = {next_ & mask, (next_ + 16) & mask};
      auto exists = [&](int row) { return next_ + row >= seen_.begin && next_ + row < seen_.end; };
      unsigned int tile = shared_ + target_;
      keys_.copy(tile, blocks, in_block, exists, policy_, lane);
      values_.copy(tile + Keys::BYTES, blocks, in_block, exists, policy_, lane);
    }
    commit_copies();
    next_ += step_;
    target_ = following(target_);
  }

  unsigned int shared_;
  Keys keys_;
  Values values_;
  BlockTable table_;
  int end_;
  KeyRange seen_;
  int step_;
  int next_;       // first token of the next tile to copy
  int blocks_[2];  // its blocks, looked up one tile ahead
  CachePolicy policy_;
  int current_ = 0;  // offset of the tile to read, in bytes
  int target_ = 0;   // offset of the tile to fill
};

}  // namespace paged
