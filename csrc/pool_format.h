// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Formats and memory layout of KV pools. mlx_paged/ops.py describes the formats for users. Includes
// no standard headers, because the vectorized CPU kernels include this file.
//
// A pool's dtype determines its format, and its last extent the head dim. A plain pool is
// `[num_blocks, block_size, num_kv_heads, head_dim]` with a float dtype. A quantized pool has the
// same first three extents, and its last one is the average size of a token and head; its blocks
// have another layout: `[block_size][num_kv_heads]` codes per head, as in a plain pool, followed by
// a tail of `[num_kv_heads][block_size]` fp16 scales per head.

#pragma once

#include <stddef.h>
#include <stdint.h>

namespace mlx_paged {

// Always inlined: otherwise each instruction set's object would contain a copy, and the linker
// would keep an arbitrary one.
#define PAGED_ALWAYS_INLINE [[gnu::always_inline]] constexpr

enum class PoolFormat {
  plain,
  int8,  // int8: one code per number, one scale per head
  int4,  // uint32: one nibble per number; a scale and a minimum per group of 32
  fp8,   // uint8: e4m3, no scales
};

constexpr int kGroup = 32;  // dims that share a scale in int4

// Groups of one head of one token.
PAGED_ALWAYS_INLINE int num_groups(int head_dim) {
  return (head_dim + kGroup - 1) / kGroup;
}

PAGED_ALWAYS_INLINE int code_bytes(PoolFormat format, int head_dim, int item_size) {
  return format == PoolFormat::plain  ? head_dim * item_size
         : format == PoolFormat::int4 ? head_dim / 2
                                      : head_dim;
}

PAGED_ALWAYS_INLINE int tail_bytes(PoolFormat format, int head_dim) {
  return format == PoolFormat::int8 ? 2 : format == PoolFormat::int4 ? 4 * num_groups(head_dim) : 0;
}

// Head dim of a quantized pool with `bytes` per token and head; 0 if there is none.
PAGED_ALWAYS_INLINE int head_dim_of(PoolFormat format, int bytes) {
  if (format == PoolFormat::int8) {
    return bytes > 2 ? bytes - 2 : 0;
  }
  if (format == PoolFormat::int4) {
    constexpr int kGroupBytes = kGroup / 2 + 4;
    int rest = bytes % kGroupBytes;
    return bytes / kGroupBytes * kGroup + (rest > 4 ? 2 * (rest - 4) : 0);
  }
  return bytes;
}

// Integer keys are rotated, which spreads outliers of single dims over all dims. Scores do not
// change as long as queries are rotated too.
PAGED_ALWAYS_INLINE bool rotates_keys(PoolFormat format) {
  return format == PoolFormat::int8 || format == PoolFormat::int4;
}

// Dims per run of the rotation: the largest power of two that divides the head dim. The rotation
// flips the signs of some dims and then applies a Walsh-Hadamard transform to each run.
PAGED_ALWAYS_INLINE int rotated_run(int head_dim) {
  return head_dim & -head_dim;
}

PAGED_ALWAYS_INLINE bool changes_sign(int dim) {
  uint32_t x = uint32_t(dim + 1) * 0x9e3779b1u;
  x = (x ^ x >> 15) * 0x85ebca77u;
  return (x ^ x >> 13) >> 31;
}

// Layout of a pool in memory.
struct PoolLayout {
  PoolFormat format;
  int num_blocks, block_size, num_kv_heads, head_dim;
  int item_size;  // of a plain pool's dtype

  PAGED_ALWAYS_INLINE int64_t head_bytes() const { return code_bytes(format, head_dim, item_size); }
  PAGED_ALWAYS_INLINE int64_t token_bytes() const { return num_kv_heads * head_bytes(); }
  PAGED_ALWAYS_INLINE int64_t tail_head_bytes() const { return tail_bytes(format, head_dim); }
  PAGED_ALWAYS_INLINE int64_t tail_begin() const { return block_size * token_bytes(); }
  PAGED_ALWAYS_INLINE int64_t block_bytes() const {
    return tail_begin() + block_size * num_kv_heads * tail_head_bytes();
  }
  // Byte offsets in the pool: of a slot's codes, and of the scales of one head and token in a
  // block.
  PAGED_ALWAYS_INLINE int64_t codes_at(int64_t slot) const {
    return slot / block_size * block_bytes() + slot % block_size * token_bytes();
  }
  PAGED_ALWAYS_INLINE int64_t scales_at(int64_t block, int head, int in_block) const {
    return block * block_bytes() + tail_begin() +
           (int64_t(head) * block_size + in_block) * tail_head_bytes();
  }
};

#undef PAGED_ALWAYS_INLINE

}  // namespace mlx_paged
