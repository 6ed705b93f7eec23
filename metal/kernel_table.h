// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Contract between the host and the kernels: the items of a plan, the params of each kernel, and
// every instantiation. Metal, nvcc, the simulator and the host's C++ include this file, so it uses
// only `int` and `float`, which are 32 bits wide everywhere, and `long`, which is 64.

#pragma once

#include "attention_variant.h"
#include "pool_layout.h"

// --- Structs

namespace paged {

// Attention of rows [row_begin, row_end) of one sequence over blocks [first_block, last_block) of
// its table. partial_begin < 0: the item covers everything its rows see and writes the output.
// Otherwise row r of the item writes its partial to row partial_begin + r of the workspace.
struct WorkItem {
  int sequence;
  int row_begin;
  int row_end;
  int first_block;
  int last_block;
  int partial_begin;
};
static_assert(sizeof(WorkItem) == 24, "the same for every compiler");

// Merge of rows [row_begin, row_end), which were split `num_splits` ways; split i of row r is
// workspace row partial_begin + i * (row_end - row_begin) + (r - row_begin).
struct MergeItem {
  int row_begin;
  int row_end;
  int partial_begin;
  int num_splits;
};
static_assert(sizeof(MergeItem) == 16, "the same for every compiler");

struct AttentionParams {
  int num_q_heads;
  int num_kv_heads;
  int block_shift;   // log2 of the block size
  int max_blocks;    // row length of block_tables
  int num_partials;  // rows of the workspace: [num_partials, num_q_heads, value_dim] sums of
                     // values, then as many maxima and sums of the softmax, each without value_dim
  int min_rows;      // a launch serves the items of [min_rows, max_rows] query rows; others are
  int max_rows;      // another launch's
  AttentionOptions options;
  int key_format;  // FORMAT_..., also as function constants (pool_options.h)
  int value_format;
  int num_written;  // an item sees at most this many keys that the step writes, its newest ones
};
static_assert(
    sizeof(AttentionParams) == 40 + sizeof(AttentionOptions), "the same for every compiler");

struct MergeParams {
  int num_q_heads;
  int num_partials;
  AttentionOptions options;
};
static_assert(sizeof(MergeParams) == 8 + sizeof(AttentionOptions), "the same for every compiler");

enum { DATA_THREADS = 256 };  // threads per threadgroup in data.h

enum {
  NORM_THREADS = 1024,   // of add_rms_norm, maximum
  NORM_CHUNKS = 4,       // per thread
  ROPE_SIMD_GROUPS = 4,  // of rope_write, one head each
  PRODUCT_ROWS = 16,     // rows of x for which products.h and experts.h read a weight once
  PRODUCT_SIMD_GROUPS = 4,
  GREEDY_THREADS = 1024,     // of greedy_tokens, maximum
  THRESHOLD_THREADS = 1024,  // of sampling_thresholds, always
  DRAW_THREADS = 128,        // of draw_tokens
  TENSOR_COLUMNS = 64,       // of a tile of tensor_product: rows of the weight
  TENSOR_DEPTH = 64,         // elements of each row that are multiplied at a time
  LORA_TARGETS = 3,          // maximum products with adapters in a launch
  LORA_ROWS = 4,             // rows of x for which lora.h reads a matrix once
  LORA_COLUMNS = 8,  // of a per threadgroup of lora_down: with LORA_ROWS, a sum for each lane
  LORA_DOWN_THREADS = 256,
  LORA_UP_THREADS = 64,
  LORA_STEP = 8,        // rows of b that a thread loads at once
  ROUTE_THREADS = 512,  // of route_experts, maximum
  ROUTE_CHUNKS = 8,     // of 32 experts: maximum number to choose from
  ROUTE_MAX_PAIRS = 4096,
};

// Bytes of threadgroup memory of sampling_thresholds: sums of bins and of SIMD-groups in two words
// each, and the round's result.
constexpr int threshold_scratch() {
  return (2 * THRESHOLD_THREADS + 2 * (THRESHOLD_THREADS / 32) + 4) * 4;
}

// Rows of the weight per SIMD-group of a product of `rows` rows: as many as fit in registers,
// because they share each load of x.
constexpr int product_columns(int rows) {
  return rows > 1 ? 2 : 4;
}

// SIMD-groups of tensor_product that share a tile of results. With four, sums of 128 rows and what
// is on its way to the tiles would not fit in registers.
constexpr int tensor_simd_groups(int rows) {
  return rows > 64 ? 8 : 4;
}

// Elements between rows of tensor_product's tiles: the padding spreads a column over the banks of
// threadgroup memory.
constexpr int tensor_pitch() {
  return TENSOR_DEPTH + 8;
}

// Bytes of threadgroup memory for tiles of `rows` rows of x and of TENSOR_COLUMNS of the weight.
constexpr int tensor_scratch(int rows) {
  return (rows + TENSOR_COLUMNS) * tensor_pitch() * 2;
}

// Counts of `chunks` are in units of 16 bytes.
struct WriteParams {
  int num_tokens;
  int key_chunks;    // per token, all heads
  int value_chunks;  // likewise
};
static_assert(sizeof(WriteParams) == 12, "the same for every compiler");

struct CopyParams {
  int num_pairs;
  int block_chunks;
};
static_assert(sizeof(CopyParams) == 8, "the same for every compiler");

struct GatherParams {
  int num_kv_heads;
  int head_chunks;  // per token and head
  int max_context_len;
  int block_shift;
  int max_blocks;
};
static_assert(sizeof(GatherParams) == 20, "the same for every compiler");

// In elements; the first two dims are those of the grid.
struct StridedParams {
  int shape_2;
  int shape_3;
  long stride_0;
  long stride_1;
  long stride_2;
  long stride_3;
};
static_assert(sizeof(StridedParams) == 40, "the same for every compiler");

struct FillParams {
  int num_chunks;
};
static_assert(sizeof(FillParams) == 4, "the same for every compiler");

struct QuantizeParams {
  int num_kv_heads;
  int key_dim;
  int value_dim;
  int block_shift;
  int key_format;
  int value_format;
  int num_tokens;
};
static_assert(sizeof(QuantizeParams) == 28, "the same for every compiler");

struct GatherQuantizedParams {
  int num_kv_heads;
  int dim;
  int max_context_len;
  int block_shift;
  int max_blocks;
  int format;
  int rotated;
};
static_assert(sizeof(GatherQuantizedParams) == 28, "the same for every compiler");

struct RotateParams {
  int num_rows;  // of all heads
  int dim;
};
static_assert(sizeof(RotateParams) == 8, "the same for every compiler");

struct BitmaskParams {
  int vocab_size;
  int num_masks;
  int num_words;  // per mask
  int in_place;   // the output already holds the logits
  int forbidden;  // bits of -inf; 16-bit ones are in the low half
};
static_assert(sizeof(BitmaskParams) == 20, "the same for every compiler");

// One edited row of edit_logits. Its entries are additions in [begin, middle) and tokens to
// penalize in [middle, end).
struct EditedRow {
  int row;
  int source;  // of its newest token; -1: the entries include it
  int begin;
  int middle;
  int end;
};
static_assert(sizeof(EditedRow) == 20, "the same for every compiler");

// An entry of edit_logits: a token, and for an addition the newest token after which it applies
// (-1: any); for a token to penalize how often it was generated.
struct LogitEntry {
  int token;
  int after_or_count;
};
static_assert(sizeof(LogitEntry) == 8, "the same for every compiler");

struct EditParams {
  int vocab_size;
};
static_assert(sizeof(EditParams) == 4, "the same for every compiler");

struct TakeParams {
  int num_rows;  // of a batch
  int num_ids;   // of a batch
  int width;
  int size;  // elements of the result, as 32 bits without a sign
};
static_assert(sizeof(TakeParams) == 16, "the same for every compiler");

// Params of greedy.h.
struct GreedyParams {
  int vocab_size;
};
static_assert(sizeof(GreedyParams) == 4, "the same for every compiler");

// Params of draw.h. A pair is two tokens that share random numbers.
struct DrawParams {
  int vocab_size;
  int num_parts;   // per row
  int part_pairs;  // per part
};
static_assert(sizeof(DrawParams) == 12, "the same for every compiler");

struct DrawnToken {
  float score;
  int token;
};
static_assert(sizeof(DrawnToken) == 8, "the same for every compiler");

// Params of thresholds.h.
struct ThresholdParams {
  int vocab_size;
};
static_assert(sizeof(ThresholdParams) == 4, "the same for every compiler");

// Params of layer.h. Chunks have 16 bytes; strides count elements between rows.
struct NormParams {
  int row_chunks;
  int has_residual;
  float eps;
};
static_assert(sizeof(NormParams) == 12, "the same for every compiler");

struct RopeParams {
  int num_q_heads;
  int num_kv_heads;
  int key_dim;
  int value_dim;
  int half_dims;  // rotated pairs of dims; 0: none
  int traditional;
  int query_stride;
  int key_stride;
  int value_stride;
  int has_query_norm;
  int has_key_norm;
  float query_eps;
  float key_eps;
};
static_assert(sizeof(RopeParams) == 52, "the same for every compiler");

struct RotationParams {
  int num_rows;
  int half_dims;
  float scale;
};
static_assert(sizeof(RotationParams) == 12, "the same for every compiler");

struct SiluParams {
  int row_chunks;
  int gate_stride;  // in chunks
  int up_stride;    // likewise
};
static_assert(sizeof(SiluParams) == 12, "the same for every compiler");

struct RowParams {
  int row_chunks;
  int num_rows;  // in the table
};
static_assert(sizeof(RowParams) == 8, "the same for every compiler");

// Params of products.h. A unit has 32 elements of a quantized weight.
struct ProductParams {
  int num_rows;
  int n;
  int k;
  int x_stride;
  int has_bias;
  int has_residual;
  int group_shift;  // log2 of the units per group of a scale
};
static_assert(sizeof(ProductParams) == 28, "the same for every compiler");

struct LookupParams {
  int row_units;
  int num_rows;  // in the table
  int group_shift;
};
static_assert(sizeof(LookupParams) == 12, "the same for every compiler");

// Params of tensor_product.h. Rows of x and of a dense weight have k elements.
struct TensorProductParams {
  int num_rows;
  int n;
  int k;
  int has_bias;
  int group_shift;  // as above
};
static_assert(sizeof(TensorProductParams) == 20, "the same for every compiler");

// Params of experts.h.
struct RouteParams {
  int num_rows;
  int num_experts;
  int top_k;
  int softmax_first;  // weights come from the probabilities of all experts; otherwise of the chosen
                      // ones
  int normalizes;     // divides the weights by their sum
  int takes_last;     // sorts the logits rather than their negatives
  int item_rows;      // maximum pairs per item
  int max_items;      // capacity of `items`
};
static_assert(sizeof(RouteParams) == 32, "the same for every compiler");

struct ExpertParams {
  int n;  // outputs per expert
  int k;
  int x_stride;
  int top_k;
  int has_bias;
  int gathers;   // x has one row per row of the step rather than per pair
  int scatters;  // results are ordered by pair rather than by expert
  int group_shift;
};
static_assert(sizeof(ExpertParams) == 32, "the same for every compiler");

struct CombineParams {
  int row_chunks;
  int top_k;
};
static_assert(sizeof(CombineParams) == 8, "the same for every compiler");

// Params of lora.h.
struct LoraParams {
  int num_rows;
  int num_adapters;
  int rank;
  int k;
  int num_parts;  // of k, whose sums lora_up adds
  int n_0;        // columns of each target
  int n_1;
  int n_2;
  int is_gated;      // one result of two targets: silu(first) * second
  int has_residual;  // added to the first target
};
static_assert(sizeof(LoraParams) == 40, "the same for every compiler");
static_assert(LORA_ROWS * LORA_COLUMNS == 32, "a sum for each lane");

}  // namespace paged

// --- Kernels

// Dtypes of pools and activations: name and type.
#define PAGED_FOR_EACH_DTYPE(X, ...) \
  X(__VA_ARGS__, float32, float)     \
  X(__VA_ARGS__, float16, half)      \
  X(__VA_ARGS__, bfloat16, bfloat)

#define PAGED_FOR_EACH_16_BIT_DTYPE(X, ...) \
  X(__VA_ARGS__, float16, half)             \
  X(__VA_ARGS__, bfloat16, bfloat)

// Kernels of data.h: non-templates as X(name), and instantiations of templates as X(host name,
// function, template arguments...).
#define PAGED_FOR_EACH_DATA_KERNEL(X) \
  X(write_kv)                         \
  X(copy_blocks)                      \
  X(gather_kv)                        \
  X(fill_zero)                        \
  X(edit_logits)

#define PAGED_FOR_EACH_DATA_TEMPLATE(X)                    \
  X("copy_strided_16", copy_strided, ushort)               \
  X("copy_strided_32", copy_strided, uint)                 \
  X("take_rows_16", take_rows, ushort)                     \
  X("take_rows_32", take_rows, uint)                       \
  X("apply_token_bitmask_16", apply_token_bitmask, ushort) \
  X("apply_token_bitmask_32", apply_token_bitmask, uint)

// Kernels of quantized_pool.h. A lane keeps one dim of every 32 in registers; X(host name,
// function, type, number of registers).
#define PAGED_QUANTIZED_PARTS(X, function, dtype, type) \
  X(#function "_" #dtype "_64", function, type, 2)      \
  X(#function "_" #dtype "_128", function, type, 4)     \
  X(#function "_" #dtype "_256", function, type, 8)     \
  X(#function "_" #dtype "_576", function, type, 18)
#define PAGED_QUANTIZED_KERNELS(X, dtype, type)           \
  PAGED_QUANTIZED_PARTS(X, quantize_kv, dtype, type)      \
  PAGED_QUANTIZED_PARTS(X, gather_quantized, dtype, type) \
  PAGED_QUANTIZED_PARTS(X, rotate_queries, dtype, type)
#define PAGED_FOR_EACH_QUANTIZED_TEMPLATE(X) PAGED_FOR_EACH_DTYPE(PAGED_QUANTIZED_KERNELS, X)

// Kernels of layer.h: operations between a layer's attention and its matrix products. X(...)
// receives the host name, the function and its template arguments.
#define PAGED_FOR_EACH_LAYER_KERNEL(X, dtype, type) \
  X("add_rms_norm_" #dtype, add_rms_norm, type)     \
  X("rope_write_" #dtype, rope_write, type)         \
  X("silu_mul_" #dtype, silu_mul, type)             \
  X("gather_rows_" #dtype, gather_rows, type)
#define PAGED_FOR_EACH_LAYER_TEMPLATE(X)     \
  X("rope_rotations", rope_rotations, float) \
  PAGED_FOR_EACH_DTYPE(PAGED_FOR_EACH_LAYER_KERNEL, X)

// Kernels of products.h and experts.h. Products have a kernel for each format of weights and number
// of rows: X(host name, function, type, weight, rows).
#define PAGED_PRODUCT_ROWS(X, function, name, ...)      \
  X(#function "_" name "_m1", function, __VA_ARGS__, 1) \
  X(#function "_" name "_m4", function, __VA_ARGS__, 4) \
  X(#function "_" name "_m16", function, __VA_ARGS__, 16)
#define PAGED_DENSE_PRODUCT(X, function, dtype, type) \
  PAGED_PRODUCT_ROWS(X, function, #dtype, type, paged::DenseWeight<type>)
#define PAGED_FOR_EACH_QUANTIZED_WEIGHT(Y, X, function, dtype, type)     \
  Y(X, function, #dtype "_affine_2", type, paged::AffineWeight<type, 2>) \
  Y(X, function, #dtype "_affine_3", type, paged::AffineWeight<type, 3>) \
  Y(X, function, #dtype "_affine_4", type, paged::AffineWeight<type, 4>) \
  Y(X, function, #dtype "_affine_5", type, paged::AffineWeight<type, 5>) \
  Y(X, function, #dtype "_affine_6", type, paged::AffineWeight<type, 6>) \
  Y(X, function, #dtype "_affine_8", type, paged::AffineWeight<type, 8>) \
  Y(X, function, #dtype "_mxfp4_4", type, paged::MxWeight<type, 4>)      \
  Y(X, function, #dtype "_mxfp8_8", type, paged::MxWeight<type, 8>)      \
  Y(X, function, #dtype "_nvfp4_4", type, paged::Nvfp4Weight<type>)
#define PAGED_LOOKUP(X, function, name, ...) X(#function "_" name, function, __VA_ARGS__)

#define PAGED_FOR_EACH_PRODUCT_KERNEL(X, dtype, type)                               \
  PAGED_DENSE_PRODUCT(X, product_rows, dtype, type)                                 \
  PAGED_FOR_EACH_QUANTIZED_WEIGHT(PAGED_PRODUCT_ROWS, X, product_rows, dtype, type) \
  PAGED_FOR_EACH_QUANTIZED_WEIGHT(PAGED_LOOKUP, X, lookup_rows, dtype, type)
#define PAGED_FOR_EACH_PRODUCT_TEMPLATE(X) PAGED_FOR_EACH_DTYPE(PAGED_FOR_EACH_PRODUCT_KERNEL, X)

#define PAGED_FOR_EACH_DENSE_EXPERT_KERNEL(X, dtype, type) \
  X("route_experts_" #dtype, route_experts, type)          \
  PAGED_DENSE_PRODUCT(X, expert_rows, dtype, type)         \
  X("combine_experts_" #dtype, combine_experts, type)
#define PAGED_FOR_EACH_EXPERT_KERNEL(X, dtype, type) \
  PAGED_FOR_EACH_DENSE_EXPERT_KERNEL(X, dtype, type) \
  PAGED_FOR_EACH_QUANTIZED_WEIGHT(PAGED_PRODUCT_ROWS, X, expert_rows, dtype, type)
#define PAGED_FOR_EACH_DENSE_EXPERT_TEMPLATE(X) \
  PAGED_FOR_EACH_DTYPE(PAGED_FOR_EACH_DENSE_EXPERT_KERNEL, X)
#define PAGED_FOR_EACH_EXPERT_TEMPLATE(X) PAGED_FOR_EACH_DTYPE(PAGED_FOR_EACH_EXPERT_KERNEL, X)

#define PAGED_FOR_EACH_LORA_KERNEL(X, dtype, type) \
  X("lora_down_" #dtype, lora_down, type)          \
  X("lora_up_" #dtype, lora_up, type)
#define PAGED_FOR_EACH_LORA_TEMPLATE(X) PAGED_FOR_EACH_DTYPE(PAGED_FOR_EACH_LORA_KERNEL, X)

#define PAGED_FOR_EACH_GREEDY_KERNEL(X, dtype, type) X("greedy_tokens_" #dtype, greedy_tokens, type)
#define PAGED_FOR_EACH_GREEDY_TEMPLATE(X) PAGED_FOR_EACH_DTYPE(PAGED_FOR_EACH_GREEDY_KERNEL, X)

// Kernels of draw.h, besides merge_draws.
#define PAGED_FOR_EACH_DRAW_KERNEL(X, dtype, type) X("draw_tokens_" #dtype, draw_tokens, type)
#define PAGED_FOR_EACH_DRAW_TEMPLATE(X) PAGED_FOR_EACH_DTYPE(PAGED_FOR_EACH_DRAW_KERNEL, X)

#define PAGED_FOR_EACH_THRESHOLD_KERNEL(X, dtype, type) \
  X("sampling_thresholds_" #dtype, sampling_thresholds, type)
#define PAGED_FOR_EACH_THRESHOLD_TEMPLATE(X) \
  PAGED_FOR_EACH_DTYPE(PAGED_FOR_EACH_THRESHOLD_KERNEL, X)

// Head dims of keys and values. 576 and 512: latent attention.
#define PAGED_FOR_EACH_NARROW_DIM(X, ...) \
  X(__VA_ARGS__, 32, 32)                  \
  X(__VA_ARGS__, 64, 64)

#define PAGED_FOR_EACH_SMALL_DIM(X, ...) \
  X(__VA_ARGS__, 80, 80)                 \
  X(__VA_ARGS__, 96, 96)

#define PAGED_FOR_EACH_MIDDLE_DIM(X, ...) \
  X(__VA_ARGS__, 112, 112)                \
  X(__VA_ARGS__, 128, 128)

#define PAGED_FOR_EACH_LARGE_DIM(X, ...) \
  X(__VA_ARGS__, 192, 128)               \
  X(__VA_ARGS__, 192, 192)               \
  X(__VA_ARGS__, 256, 256)

#define PAGED_FOR_EACH_WIDE_DIM(X, ...) \
  X(__VA_ARGS__, 512, 512)              \
  X(__VA_ARGS__, 576, 512)

#define PAGED_FOR_EACH_DIM_TO_128(X, ...)   \
  PAGED_FOR_EACH_NARROW_DIM(X, __VA_ARGS__) \
  PAGED_FOR_EACH_SMALL_DIM(X, __VA_ARGS__)  \
  PAGED_FOR_EACH_MIDDLE_DIM(X, __VA_ARGS__)

#define PAGED_FOR_EACH_DIM_TO_256(X, ...)   \
  PAGED_FOR_EACH_DIM_TO_128(X, __VA_ARGS__) \
  PAGED_FOR_EACH_LARGE_DIM(X, __VA_ARGS__)

#define PAGED_FOR_EACH_HEAD_DIM(X, ...)     \
  PAGED_FOR_EACH_DIM_TO_256(X, __VA_ARGS__) \
  PAGED_FOR_EACH_WIDE_DIM(X, __VA_ARGS__)

#define PAGED_FOR_EACH_V_DIM(X, ...) \
  X(__VA_ARGS__, 32)                 \
  X(__VA_ARGS__, 64)                 \
  X(__VA_ARGS__, 80)                 \
  X(__VA_ARGS__, 96)                 \
  X(__VA_ARGS__, 112)                \
  X(__VA_ARGS__, 128)                \
  X(__VA_ARGS__, 192)                \
  X(__VA_ARGS__, 256)                \
  X(__VA_ARGS__, 512)

// Instantiations of the attention kernels, each in the .h file named after its function. X(...)
// receives the same arguments. Each list is for one dtype, given by name and type. The registers of
// Apple's GPUs limit the lists (attention_shape.h); NVIDIA has its own lists
// (csrc/cuda/portable_shape.h).

// Queries (rows x heads per group): as many as the vector units keep up with.
#define PAGED_FOR_EACH_DECODE(X, ...)                             \
  PAGED_FOR_EACH_DIM_TO_256(PAGED_DECODE_QUERIES, X, __VA_ARGS__) \
  PAGED_FOR_EACH_WIDE_DIM(PAGED_DECODE_QUERY, X, __VA_ARGS__)
#define PAGED_DECODE_QUERIES(X, dtype, type, k_dim, v_dim) \
  PAGED_DECODE(X, dtype, type, k_dim, v_dim, 1)            \
  PAGED_DECODE(X, dtype, type, k_dim, v_dim, 2)            \
  PAGED_DECODE(X, dtype, type, k_dim, v_dim, 3)
#define PAGED_DECODE_QUERY(X, dtype, type, k_dim, v_dim) \
  PAGED_DECODE(X, dtype, type, k_dim, v_dim, 1)
#define PAGED_DECODE(X, dtype, type, k_dim, v_dim, queries)                                       \
  X("paged_decode_" #dtype "_" #k_dim "_" #v_dim "_q" #queries, paged_decode, type, k_dim, v_dim, \
    queries)

// Rows of the matrix.
#define PAGED_FOR_EACH_MATRIX(X, ...)                             \
  PAGED_FOR_EACH_NARROW_DIM(PAGED_MATRICES_64, X, __VA_ARGS__)    \
  PAGED_FOR_EACH_SMALL_DIM(PAGED_MATRICES_32, X, __VA_ARGS__)     \
  PAGED_FOR_EACH_MIDDLE_DIM(PAGED_MATRICES_32_16, X, __VA_ARGS__) \
  PAGED_FOR_EACH_LARGE_DIM(PAGED_MATRICES_32_16, X, __VA_ARGS__)  \
  PAGED_FOR_EACH_WIDE_DIM(PAGED_MATRICES_16_8, X, __VA_ARGS__)
#define PAGED_MATRICES_16(X, dtype, type, k_dim, v_dim) \
  PAGED_MATRIX(X, dtype, type, k_dim, v_dim, 8)         \
  PAGED_MATRIX(X, dtype, type, k_dim, v_dim, 16)
#define PAGED_MATRICES_32(X, dtype, type, k_dim, v_dim) \
  PAGED_MATRICES_16(X, dtype, type, k_dim, v_dim)       \
  PAGED_MATRIX(X, dtype, type, k_dim, v_dim, 32)
// With more rows in 16 bits than in 32.
#define PAGED_MATRICES_16_8(X, dtype, type, k_dim, v_dim) \
  PAGED_MATRIX(X, dtype, type, k_dim, v_dim, 8)           \
  PAGED_IF_16_BITS_##dtype(PAGED_MATRIX(X, dtype, type, k_dim, v_dim, 16))
#define PAGED_MATRICES_32_16(X, dtype, type, k_dim, v_dim) \
  PAGED_MATRICES_16(X, dtype, type, k_dim, v_dim)          \
  PAGED_IF_16_BITS_##dtype(PAGED_MATRIX(X, dtype, type, k_dim, v_dim, 32))
#define PAGED_MATRICES_64(X, dtype, type, k_dim, v_dim) \
  PAGED_MATRICES_32(X, dtype, type, k_dim, v_dim)       \
  PAGED_IF_16_BITS_##dtype(PAGED_MATRIX(X, dtype, type, k_dim, v_dim, 64))
#define PAGED_MATRIX(X, dtype, type, k_dim, v_dim, rows)                                       \
  X("paged_decode_matrix_" #dtype "_" #k_dim "_" #v_dim "_m" #rows, paged_decode_matrix, type, \
    k_dim, v_dim, rows)

// Rows of the matrix; larger heads have none.
#define PAGED_FOR_EACH_PREFILL(X, ...)                         \
  PAGED_FOR_EACH_NARROW_DIM(PAGED_PREFILLS_64, X, __VA_ARGS__) \
  PAGED_FOR_EACH_SMALL_DIM(PAGED_PREFILLS_32, X, __VA_ARGS__)  \
  PAGED_FOR_EACH_MIDDLE_DIM(PAGED_PREFILLS_32, X, __VA_ARGS__)
#define PAGED_PREFILLS_32(X, dtype, type, k_dim, v_dim) \
  PAGED_PREFILL(X, dtype, type, k_dim, v_dim, 32)
#define PAGED_PREFILLS_64(X, dtype, type, k_dim, v_dim) \
  PAGED_PREFILLS_32(X, dtype, type, k_dim, v_dim)       \
  PAGED_IF_16_BITS_##dtype(PAGED_PREFILL(X, dtype, type, k_dim, v_dim, 64))
#define PAGED_PREFILL(X, dtype, type, k_dim, v_dim, rows)                                        \
  X("paged_prefill_" #dtype "_" #k_dim "_" #v_dim "_m" #rows, paged_prefill, type, k_dim, v_dim, \
    rows)

#define PAGED_IF_16_BITS_float32(...)
#define PAGED_IF_16_BITS_float16(...) __VA_ARGS__
#define PAGED_IF_16_BITS_bfloat16(...) __VA_ARGS__

#define PAGED_FOR_EACH_MERGE(X, ...) PAGED_FOR_EACH_V_DIM(PAGED_MERGE, X, __VA_ARGS__)
#define PAGED_MERGE(X, dtype, type, v_dim) \
  X("paged_merge_" #dtype "_" #v_dim, paged_merge, type, v_dim)

#define PAGED_FOR_EACH_ATTENTION_TEMPLATE(X)      \
  PAGED_FOR_EACH_DTYPE(PAGED_FOR_EACH_DECODE, X)  \
  PAGED_FOR_EACH_DTYPE(PAGED_FOR_EACH_MATRIX, X)  \
  PAGED_FOR_EACH_DTYPE(PAGED_FOR_EACH_PREFILL, X) \
  PAGED_FOR_EACH_DTYPE(PAGED_FOR_EACH_MERGE, X)

// Kernels for tensor units, in Metal 4 (tensor_units.h). Each is in the .h file named after its
// function.
#define PAGED_FOR_EACH_TENSOR_PREFILL(X, ...) \
  PAGED_FOR_EACH_DIM_TO_128(PAGED_TENSOR_PREFILLS, X, __VA_ARGS__)
#define PAGED_TENSOR_PREFILLS(X, dtype, type, k_dim, v_dim) \
  PAGED_TENSOR_PREFILL(X, dtype, type, k_dim, v_dim, 32)    \
  PAGED_TENSOR_PREFILL(X, dtype, type, k_dim, v_dim, 64)
#define PAGED_TENSOR_PREFILL(X, dtype, type, k_dim, v_dim, rows)                                   \
  X("tensor_prefill_" #dtype "_" #k_dim "_" #v_dim "_m" #rows, tensor_prefill, type, k_dim, v_dim, \
    rows)

// X(host name, function, type, weight, rows of x per tile).
#define PAGED_TENSOR_PRODUCT_ROWS(X, function, name, ...) \
  X(#function "_" name "_m32", function, __VA_ARGS__, 32) \
  X(#function "_" name "_m64", function, __VA_ARGS__, 64) \
  X(#function "_" name "_m128", function, __VA_ARGS__, 128)
#define PAGED_FOR_EACH_TENSOR_PRODUCT(X, dtype, type)                                  \
  PAGED_TENSOR_PRODUCT_ROWS(X, tensor_product, #dtype, type, paged::DenseWeight<type>) \
  PAGED_FOR_EACH_QUANTIZED_WEIGHT(PAGED_TENSOR_PRODUCT_ROWS, X, tensor_product, dtype, type)

#define PAGED_FOR_EACH_TENSOR_TEMPLATE(X)                       \
  PAGED_FOR_EACH_16_BIT_DTYPE(PAGED_FOR_EACH_TENSOR_PREFILL, X) \
  PAGED_FOR_EACH_16_BIT_DTYPE(PAGED_FOR_EACH_TENSOR_PRODUCT, X)
