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

#include "../metal/pool_layout.h"

namespace mlx_paged {

// Always inlined: otherwise each instruction set's object would contain a copy, and the linker
// would keep an arbitrary one.
#define PAGED_ALWAYS_INLINE [[gnu::always_inline]] constexpr

enum class PoolFormat {
  plain = paged::FORMAT_PLAIN,
  int8 = paged::FORMAT_INT8,  // pool dtype int8
  int4 = paged::FORMAT_INT4,  // pool dtype uint32
  fp8 = paged::FORMAT_FP8,    // pool dtype uint8
};

constexpr int kGroup = paged::CODE_GROUP;

PAGED_ALWAYS_INLINE int code_bytes(PoolFormat format, int head_dim, int item_size) {
  return format == PoolFormat::plain ? head_dim * item_size
                                     : paged::code_bytes(int(format), head_dim);
}

PAGED_ALWAYS_INLINE int tail_bytes(PoolFormat format, int head_dim) {
  return paged::tail_bytes(int(format), head_dim);
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

PAGED_ALWAYS_INLINE bool rotates_keys(PoolFormat format) {
  return paged::rotates_keys(int(format));
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
