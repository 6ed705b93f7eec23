// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// The contract of the four operations on a paged KV pool, and of what a layer does between its
// matrix products.
//
// A pool is `[num_blocks, block_size, num_kv_heads, head_dim]`, token-major inside a block. Keys
// and values have a pool each, whose head dims may differ. A slot is `block * block_size + offset`.
//
// Ownership. `write_kv` and `copy_blocks` are in place, unconditionally: the arrays they return
// share the buffers of the pools passed in, whatever else holds those. So
//   - the handle passed in is consumed; use the one returned;
//   - all reads and writes of a pool go through one stream;
//   - a freed block is not handed out until the last step that could read it has been evaluated.
// Donation would not do: a step in flight holds the buffer, and every overlapped step would then
// copy the whole pool. `pool_copies()` counts the copies that could not be avoided (a pool that is
// not row-contiguous); the engine's tests hold it at zero.

#pragma once

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "mlx/array.h"
#include "mlx/utils.h"

namespace mlx_paged {

namespace mx = mlx::core;

// The arrays of one step, built once and shared by all layers. A query row is one token.
struct AttentionPlan {
  mx::array positions;     // [num_rows] int32: position of the row's token in its sequence
  mx::array block_tables;  // [num_seqs, max_blocks] int32
  mx::array work_items;    // [num_items, 6] int32, see WorkItem
  mx::array merge_items;   // [num_merges, 4] int32, see MergeItem
};

// Rows [row_begin, row_end) of one sequence against blocks [first_block, last_block) of its table.
// Row r sees the keys at positions <= positions[r]. With partial_begin < 0 the item covers all that
// its rows can see and writes the output; otherwise it leaves an fp32 partial per row and head in
// rows [partial_begin, partial_begin + row_end - row_begin) of the workspace.
struct WorkItem {
  int32_t sequence;
  int32_t row_begin;
  int32_t row_end;
  int32_t first_block;
  int32_t last_block;
  int32_t partial_begin;
};

// Rows [row_begin, row_end) were split `num_splits` ways; split i of row r is workspace row
// partial_begin + i * (row_end - row_begin) + (r - row_begin).
struct MergeItem {
  int32_t row_begin;
  int32_t row_end;
  int32_t partial_begin;
  int32_t num_splits;
};

struct AttentionOptions {
  float scale;
  int window = 0;     // keys in (position - window, position]; 0: all
  float softcap = 0;  // scores become softcap * tanh(score / softcap); 0: off
  std::optional<mx::array> sinks = std::nullopt;  // [num_q_heads] logits that join the softmax
};

// Writes token i's key and value to slot slot_mapping[i]; -1 writes nothing.
// Returns the key and the value pool (in place, see above).
std::pair<mx::array, mx::array> write_kv(
    const mx::array& key_pool, const mx::array& value_pool,
    const mx::array& keys,          // [num_tokens, num_kv_heads, key_dim]
    const mx::array& values,        // [num_tokens, num_kv_heads, value_dim]
    const mx::array& slot_mapping,  // [num_tokens] int32
    mx::StreamOrDevice s = {});

// Copies block src to block dst in every pool, for each (src, dst). The pairs run in no particular
// order, so no block may be a destination twice, or a destination and a source.
// Returns the pools (in place, see above).
std::vector<mx::array> copy_blocks(
    const std::vector<mx::array>& pools,
    const mx::array& block_pairs,  // [num_pairs, 2] int32
    mx::StreamOrDevice s = {});

// Dense keys `[num_seqs, num_kv_heads, max_context_len, key_dim]` and values; zeros past a context.
std::pair<mx::array, mx::array> gather_kv(
    const mx::array& key_pool, const mx::array& value_pool,
    const mx::array& block_tables,  // [num_seqs, max_blocks] int32
    const mx::array& context_lens,  // [num_seqs] int32
    int max_context_len, mx::StreamOrDevice s = {});

// Attention of `[num_rows, num_q_heads, key_dim]` over the pool: `[num_rows, num_q_heads,
// value_dim]`. Rows that no work item names come out as zeros.
mx::array paged_attention(
    const mx::array& queries, const mx::array& key_pool, const mx::array& value_pool,
    const AttentionPlan& plan, const AttentionOptions& options, mx::StreamOrDevice s = {});

// The operations below have no gradient and run on the CPU only, where MLX composes each of many.
// All compute in fp32 and round once. Inputs are float32, float16 or bfloat16.

// Cosines and sines of the angle position * scale * inv_freq, [num_rows, 2, half_dims] float32,
// once for all layers of a step. Angles are products in float32, as MLX's own are.
mx::array rope_rotations(
    const mx::array& positions,  // [num_rows] int32
    const mx::array& inv_freqs,  // [half_dims] float32
    float scale, mx::StreamOrDevice s = {});

// Rotates the first 2 * half_dims dims of every head of `[num_rows, num_heads, 1, head_dim]`: dim i
// with dim i + half_dims, or (`traditional`) dim 2i with dim 2i + 1.
mx::array rope(
    const mx::array& x, const mx::array& rotations, bool traditional, mx::StreamOrDevice s = {});

// x / sqrt(mean(x^2) + eps) * weight over the last axis.
mx::array rms_norm(
    const mx::array& x, const std::optional<mx::array>& weight, float eps,
    mx::StreamOrDevice s = {});

// gate * sigmoid(gate) * x, of one shape and dtype.
mx::array silu_mul(const mx::array& gate, const mx::array& x, mx::StreamOrDevice s = {});

// The first largest of each row of `[num_rows, vocab_size]` logits, int32, and whether the row
// holds a NaN, bool (its token is then any).
std::pair<mx::array, mx::array> greedy_tokens(const mx::array& logits, mx::StreamOrDevice s = {});

// top-p: the least logit of each row that is likelier than the rest of the row's first top_p of
// probability, [num_rows] float32. Only logits of at least the row's floor count.
mx::array nucleus_thresholds(
    const mx::array& logits,  // [num_rows, vocab_size] float32, the largest of each row 0
    const mx::array& floors,  // [num_rows] float32, at most 0
    const mx::array& top_p,   // [num_rows] float32, above 0 and below 1
    mx::StreamOrDevice s = {});

// x @ weight.T + bias, of float32 on the CPU, as one node of the graph where MLX has five; of 16
// bits and up to 32 rows with CUDA, in one kernel. What it does not serve (another dtype, weights
// that are not plain rows, no BLAS to call) is MLX's composition.
mx::array linear(
    const mx::array& x,       // [..., k]
    const mx::array& weight,  // [n, k]
    const std::optional<mx::array>& bias, mx::StreamOrDevice s = {});

// A pool that is allocated but not touched: memory is used from the first write on, so a large pool
// costs nothing until it is needed. Its contents are undefined. On Linux it asks for huge pages, as
// decode visits memory in an order that small pages make slow. Throws std::bad_alloc.
mx::array allocate_pool(const std::vector<int>& shape, mx::Dtype dtype);

// Whole-pool copies made since the process started.
int64_t pool_copies();

}  // namespace mlx_paged
