// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Kernels that only move data, and masks. Those for keys and values move 16 bytes per thread where
// rows are dense.

#pragma once

#include <metal_stdlib>

#include "block_table.h"
#include "kernel_table.h"
#include "language.h"

using namespace metal;

// Copies each token's key and value to its slot, in place. A token's heads are contiguous on both
// sides, so this moves 16 bytes per thread for any dtype.
// grid: (chunks of a token / 256 rounded up, tokens).
PAGED_KERNEL(paged::DATA_THREADS)
write_kv(
    device const uint4* keys [[buffer(0)]], device const uint4* values [[buffer(1)]],
    device const int* slot_mapping [[buffer(2)]], device uint4* key_pool [[buffer(3)]],
    device uint4* value_pool [[buffer(4)]], constant paged::WriteParams& params [[buffer(5)]],
    PAGED_THREAD_POSITION) {
  int chunk = group_id.x * group_size.x + thread_id;
  ulong token = group_id.y;
  int slot = slot_mapping[token];
  if (slot < 0 || chunk >= params.key_chunks + params.value_chunks) {
    return;
  }
  if (chunk < params.key_chunks) {
    key_pool[ulong(slot) * params.key_chunks + chunk] = keys[token * params.key_chunks + chunk];
  } else {
    chunk -= params.key_chunks;
    value_pool[ulong(slot) * params.value_chunks + chunk] =
        values[token * params.value_chunks + chunk];
  }
}

// Copies whole blocks of a pool in place, for each pair (source, destination). Each thread loads
// four 16-byte chunks before it stores the first.
// grid: (chunks of a block / 1024 rounded up, pairs).
PAGED_KERNEL(paged::DATA_THREADS)
copy_blocks(
    device const int2* block_pairs [[buffer(0)]], device uint4* pool [[buffer(1)]],
    constant paged::CopyParams& params [[buffer(2)]], PAGED_THREAD_POSITION) {
  constexpr int LOADS = 4;
  int2 pair = block_pairs[group_id.y];
  device const uint4* source = pool + ulong(pair.x) * params.block_chunks;
  device uint4* destination = pool + ulong(pair.y) * params.block_chunks;
  int first = int(group_id.x * group_size.x) * LOADS + int(thread_id);
  uint4 chunks[LOADS];
  PAGED_UNROLL
  for (int i = 0; i < LOADS; i++) {
    int chunk = first + i * int(group_size.x);
    if (chunk < params.block_chunks) {
      chunks[i] = source[chunk];
    }
  }
  PAGED_UNROLL
  for (int i = 0; i < LOADS; i++) {
    int chunk = first + i * int(group_size.x);
    if (chunk < params.block_chunks) {
      destination[chunk] = chunks[i];
    }
  }
}

// Gathers keys or values of whole sequences into a dense [num_seqs, num_kv_heads, max_context_len,
// dim], with zeros past each context. Moves 16 bytes per thread for any dtype.
// grid: (chunks of a head's tokens / 256 rounded up, KV heads, sequences).
PAGED_KERNEL(paged::DATA_THREADS)
gather_kv(
    device const uint4* pool [[buffer(0)]], device const int* block_tables [[buffer(1)]],
    device const int* context_lens [[buffer(2)]], device uint4* dense [[buffer(3)]],
    constant paged::GatherParams& params [[buffer(4)]], PAGED_THREAD_POSITION) {
  int index = group_id.x * group_size.x + thread_id;
  int token = index / params.head_chunks;
  int chunk = index % params.head_chunks;
  if (token >= params.max_context_len) {
    return;
  }
  int head = group_id.y;
  ulong sequence = group_id.z;
  uint4 bytes = uint4(0);
  if (token < context_lens[sequence]) {
    paged::BlockTable table = {block_tables + sequence * params.max_blocks, params.block_shift};
    bytes = pool[(table.slot(token) * params.num_kv_heads + head) * params.head_chunks + chunk];
  }
  ulong row = (sequence * params.num_kv_heads + head) * params.max_context_len + token;
  dense[row * params.head_chunks + chunk] = bytes;
}

// Zeros an output before the attention kernels write only some of its rows.
// grid: chunks of 16 bytes / 256 rounded up.
PAGED_KERNEL(paged::DATA_THREADS)
fill_zero(
    device uint4* out [[buffer(0)]], constant paged::FillParams& params [[buffer(1)]],
    PAGED_THREAD_POSITION) {
  int chunk = group_id.x * group_size.x + thread_id;
  if (chunk < params.num_chunks) {
    out[chunk] = uint4(0);
  }
}

// Copies an array to dense memory if its elements are not contiguous or not aligned to 16 bytes,
// which the other kernels require. Rarely needed: pools and activations satisfy both.
// grid: (elements of the last two dims / 256 rounded up, second dim, first dim).
template <typename T>
PAGED_KERNEL(paged::DATA_THREADS)
copy_strided(
    device const T* in [[buffer(0)]], device T* out [[buffer(1)]],
    constant paged::StridedParams& params [[buffer(2)]],
    uint3 group_id [[threadgroup_position_in_grid]], uint3 group_size [[threads_per_threadgroup]],
    uint3 grid [[threadgroups_per_grid]], uint thread_id [[thread_index_in_threadgroup]]) {
  long element = long(group_id.x) * group_size.x + thread_id;
  long row_size = long(params.shape_2) * params.shape_3;
  if (element >= row_size) {
    return;
  }
  long from = group_id.z * params.stride_0 + group_id.y * params.stride_1 +
              element / params.shape_3 * params.stride_2 +
              element % params.shape_3 * params.stride_3;
  out[(ulong(group_id.z) * grid.y + group_id.y) * row_size + element] = in[from];
}

// True for non-finite numbers, given as bits; `infinite` holds the bits of infinity.
template <typename T>
constexpr bool is_not_finite(T number, T infinite) {
  T magnitude = T(~T(0)) >> 1;
  return (number & magnitude) >= (infinite & magnitude);
}

// Sets logits of forbidden tokens to -inf, except NaN and inf, which a mask must not hide. T: an
// unsigned integer as wide as a logit. Rows of a vocabulary can start anywhere, so this works on
// elements: each thread loads four before it stores the first. The 32 lanes of a SIMD-group share
// one word of the mask.
// grid: (elements of a row / 1024 rounded up, masks, or rows if logits are copied).
template <typename T>
PAGED_KERNEL(paged::DATA_THREADS)
apply_token_bitmask(
    device const T* logits [[buffer(0)]], device const uint* bitmask [[buffer(1)]],
    device const int* rows [[buffer(2)]], device T* out [[buffer(3)]],
    constant paged::BitmaskParams& params [[buffer(4)]], threadgroup int* found PAGED_SCRATCH,
    PAGED_THREAD_POSITION) {
  constexpr int TOKENS = 4;
  int mask = group_id.y;
  ulong row = group_id.y;
  if (params.in_place) {
    row = rows[mask];
  } else {
    if (thread_id == 0) {
      *found = -1;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int i = thread_id; i < params.num_masks; i += group_size.x) {
      if (rows[i] == int(row)) {
        *found = i;
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    mask = *found;
  }
  ulong row_begin = row * params.vocab_size;
  ulong mask_begin = ulong(max(mask, 0)) * params.num_words;
  int first = int(group_id.x * group_size.x) * TOKENS + int(thread_id);
  T values[TOKENS];
  bool allowed[TOKENS];
  PAGED_UNROLL
  for (int i = 0; i < TOKENS; i++) {
    int token = first + i * int(group_size.x);
    if (token < params.vocab_size) {
      uint word = mask < 0 ? ~0u : bitmask[mask_begin + token / 32];
      values[i] = params.in_place ? out[row_begin + token] : logits[row_begin + token];
      allowed[i] = (word >> (token % 32) & 1) || is_not_finite(values[i], T(params.forbidden));
    }
  }
  PAGED_UNROLL
  for (int i = 0; i < TOKENS; i++) {
    int token = first + i * int(group_size.x);
    if (token < params.vocab_size && !(params.in_place && allowed[i])) {
      out[row_begin + token] = allowed[i] ? values[i] : T(params.forbidden);
    }
  }
}

// Takes rows of each batch: out[batch, i] = a[batch, ids[batch, i]].
// grid: elements of the result / 256 rounded up.
template <typename T>
PAGED_KERNEL(paged::DATA_THREADS)
take_rows(
    device const T* a [[buffer(0)]], device const uint* ids [[buffer(1)]],
    device T* out [[buffer(2)]], constant paged::TakeParams& params [[buffer(3)]],
    PAGED_THREAD_POSITION) {
  uint element = group_id.x * group_size.x + thread_id;
  if (element >= uint(params.size)) {
    return;
  }
  uint entry = element / uint(params.width);
  ulong batch = entry / uint(params.num_ids);
  ulong row = batch * params.num_rows + ids[entry];
  out[element] = a[row * params.width + element % uint(params.width)];
}

// The logit of a token that was generated `count` times, after penalties.
METAL_FUNC float penalized(float logit, int count, device const float* factors) {
  float repetition = factors[0];
  logit = logit > 0.0f ? logit / repetition : logit * repetition;
  // Rounded by itself: a fused multiply-add would give other bits than the CPU.
  volatile float by_count = factors[2] * float(count);
  return logit - by_count - (count > 0 ? factors[1] : 0.0f);
}

// Edits rows of logits in place: adds values to single ones, then penalizes tokens that a row has
// had. `factors` holds repetition, presence and frequency penalty of each row.
// grid: edited rows.
PAGED_KERNEL(paged::DATA_THREADS)
edit_logits(
    device const paged::EditedRow* rows [[buffer(0)]], device const float* factors [[buffer(1)]],
    device const paged::LogitEntry* entries [[buffer(2)]], device const float* values [[buffer(3)]],
    device const int* newest [[buffer(4)]], device float* out [[buffer(5)]],
    constant paged::EditParams& params [[buffer(6)]], threadgroup int* has_newest PAGED_SCRATCH,
    PAGED_THREAD_POSITION) {
  using namespace paged;
  EditedRow edited = rows[group_id.x];
  device float* logits = out + ulong(edited.row) * params.vocab_size;
  int last = edited.source < 0 ? -1 : newest[edited.source];
  int step = int(group_size.x);
  if (thread_id == 0) {
    *has_newest = 0;
  }
  // A token may repeat with -inf, so those come last. They may write the same value twice.
  for (int pass = 0; pass < 2; pass++) {
    for (int i = edited.begin + int(thread_id); i < edited.middle; i += step) {
      LogitEntry entry = entries[i];
      bool applies = entry.after_or_count < 0 || entry.after_or_count == last;
      if (applies && (values[i] == -INFINITY) == (pass == 1)) {
        logits[entry.token] += values[i];
      }
    }
    threadgroup_barrier(mem_flags::mem_device);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  device const float* own = factors + 3 * group_id.x;
  for (int i = edited.middle + int(thread_id); i < edited.end; i += step) {
    LogitEntry entry = entries[i];
    bool again = entry.token == last;
    if (again) {
      *has_newest = 1;
    }
    logits[entry.token] = penalized(logits[entry.token], entry.after_or_count + again, own);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (thread_id == 0 && last >= 0 && *has_newest == 0) {
    logits[last] = penalized(logits[last], 1, own);
  }
}
