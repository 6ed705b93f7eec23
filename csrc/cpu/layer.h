// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Arguments of the vectorized kernels for row operations between a layer's matrix products, and for
// sampling. All compute in fp32 and round once.

#pragma once

#include <cstddef>
#include <cstdint>

#include "../dtype.h"
#include "../weight_format.h"

namespace mlx_paged::cpu {

struct RopeArgs {
  DType dtype;
  const void* x;       // [num_rows, num_heads, head_dim], strided
  int64_t row_stride;  // in elements
  int64_t head_stride;
  int64_t dim_stride;
  const float* rotations;  // [num_rows, 2, half_dims]: cosines, sines
  void* out;               // [num_rows, num_heads, head_dim]
  int num_heads;
  int head_dim;
  int half_dims;  // rotated pairs; other dims are copied
  bool traditional;
};

struct RmsNormArgs {
  DType dtype;
  const void* x;       // [num_rows, size]
  const void* weight;  // [size] or null
  void* out;           // [num_rows, size]; may be x
  int64_t size;
  float eps;
};

struct SiluMulArgs {
  DType dtype;
  const void* gate;  // [size]
  const void* x;     // [size]
  void* out;         // [size]; may be gate or x
};

struct LayerNormArgs {
  DType dtype;
  const void* x;       // [num_rows, size]
  const void* weight;  // [size] or null
  const void* bias;    // [size] or null
  void* out;           // [num_rows, size]; may be x
  int64_t size;
  float eps;
};

struct GeluArgs {
  DType dtype;
  GeluKind kind;
  const void* x;  // [size]
  void* out;      // [size]; may be x
};

struct ClippedSwigluArgs {
  DType dtype;
  const void* gate;  // [size]
  const void* x;     // [size]
  void* out;         // [size]; may be gate or x
  float alpha;
  float limit;
};

struct GreedyArgs {
  DType dtype;
  const void* logits;  // [num_rows, size]
  int32_t* tokens;     // [num_rows]
  float* largest;      // [num_rows]: logits of `tokens`; NaN if the row holds one
  int32_t* reported;   // [num_rows]: `tokens`, or -1 if the largest logit is not finite
  int64_t size;
};

struct DrawArgs {
  DType dtype;
  const void* logits;        // [num_rows, size]
  const int32_t* tokens;     // [num_rows], those of GreedyArgs
  const float* largest;      // [num_rows], likewise
  const float* temperature;  // [num_rows]
  const uint32_t* keys;      // [num_rows, 2]
  const float* thresholds;   // [num_rows]: smaller scaled logits do not count
  const int32_t* rows;       // the rows to process
  int32_t* drawn;            // [num_rows]
  int64_t size;
};

struct MaskedRow {
  int32_t row;
  int32_t mask;  // -1: only copies the row
};

struct BitmaskArgs {
  DType dtype;
  const void* logits;       // [num_rows, size]; may be out
  const uint32_t* bitmask;  // [num_masks, (size + 31) / 32]
  const MaskedRow* rows;    // the rows to process
  void* out;                // [num_rows, size]
  int64_t size;
};

// A row's logits are scaled to (logit - largest) / temperature.
struct ThresholdArgs {
  DType dtype;
  const void* logits;        // [num_rows, size]
  const float* largest;      // [num_rows]
  const float* temperature;  // [num_rows]
  const float* floors;       // [num_rows]: smaller scaled logits do not count
  const int32_t* top_k;      // [num_rows]: no limit if not in (0, size)
  const float* top_p;        // [num_rows]: no limit if at least 1
  float* thresholds;         // [num_rows]
  int64_t size;
};

// Rows that share one pass over the matrices of their adapter.
constexpr int kLoraRows = 4;
// Columns of `a` that are summed together.
constexpr int kLoraColumns = 4;

// Rows of one low-rank adapter: hidden = x @ a.T, and then out += hidden @ b. A row's sums do not
// depend on num_rows or on the columns of a call.
struct LoraArgs {
  DType dtype;  // of a and b
  int num_rows;
  int rank;
  int k;
  int n;
  const void* a;              // [rank, k]
  const void* b;              // [rank, n]
  const void* next;           // the next call's a or b, to be prefetched
  const float* x[kLoraRows];  // [k] each
  float* hidden[kLoraRows];   // [rank] each
  float* out[kLoraRows];      // [n] each
};

// Each kernel processes rows, elements, or columns of a result [begin, end).
struct LayerKernels {
  void (*rope)(const RopeArgs& args, int64_t begin, int64_t end);
  void (*rms_norm)(const RmsNormArgs& args, int64_t begin, int64_t end);
  void (*silu_mul)(const SiluMulArgs& args, int64_t begin, int64_t end);
  void (*layer_norm)(const LayerNormArgs& args, int64_t begin, int64_t end);
  void (*gelu)(const GeluArgs& args, int64_t begin, int64_t end);
  void (*clipped_swiglu)(const ClippedSwigluArgs& args, int64_t begin, int64_t end);
  void (*greedy)(const GreedyArgs& args, int64_t begin, int64_t end);
  void (*draw)(const DrawArgs& args, int64_t begin, int64_t end);
  void (*bitmask)(const BitmaskArgs& args, int64_t begin, int64_t end);
  void (*thresholds)(const ThresholdArgs& args, int64_t begin, int64_t end);
  void (*lora_down)(const LoraArgs& args, int64_t begin, int64_t end);  // columns of hidden
  void (*lora_up)(const LoraArgs& args, int64_t begin, int64_t end);    // columns of out
};

}  // namespace mlx_paged::cpu
