// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// The attention variant: a layer's score options, and the hooks that apply them. The kernels for
// Metal, NVIDIA and the CPU all include this file, and so does the host; it includes nothing
// itself.
//
// Logits are in base 2. A row of the score matrix is a query row and a query head.
//
// A new option needs a field of AttentionOptions, a condition PAGED_HAS_..., its term in a hook and
// its bit in features_of; csrc/ops.cpp checks it and sets the field.

#pragma once

// --- Keywords that differ between compilers

#if defined(__CUDACC__)
#define PAGED_HOOK __device__ __forceinline__
#define PAGED_SHARED const
#define PAGED_BUFFER const
#elif defined(__METAL_VERSION__) || defined(METAL_FUNC)
#define PAGED_HOOK METAL_FUNC
#define PAGED_SHARED constant
#define PAGED_BUFFER device const
#define PAGED_COMPILES_FEATURES
#else
// Static, because the CPU's kernels are compiled once per instruction set and the linker must not
// merge these functions.
#define PAGED_HOOK static inline __attribute__((always_inline))
#define PAGED_SHARED const
#define PAGED_BUFFER const
#define PAGED_HOST
#endif

// --- Options of a layer or step

// Function constants in Metal: a pipeline has no code for options that it lacks. features_of lists
// their values.
#ifndef PAGED_HAS_WINDOW
#ifdef PAGED_COMPILES_FEATURES
constant bool paged_has_window [[function_constant(4)]];
constant bool paged_has_softcap [[function_constant(5)]];
constant bool paged_has_sinks [[function_constant(6)]];
constant bool paged_has_bounds [[function_constant(7)]];
constant bool paged_has_alibi [[function_constant(8)]];
#define PAGED_HAS_WINDOW(options) paged_has_window
#define PAGED_HAS_SOFTCAP(options) paged_has_softcap
#define PAGED_HAS_SINKS(options) paged_has_sinks
#define PAGED_HAS_BOUNDS(options) paged_has_bounds
#define PAGED_HAS_ALIBI(options) paged_has_alibi
#else
#define PAGED_HAS_WINDOW(options) true  // WHOLE_CONTEXT hides no token
#define PAGED_HAS_SOFTCAP(options) ((options).softcap > 0.0f)
#define PAGED_HAS_SINKS(options) ((options).has_sinks != 0)
#define PAGED_HAS_ALIBI(options) (PAGED_SERVES_ROW_OPTIONS && (options).has_alibi != 0)
#ifndef PAGED_HAS_BOUNDS  // a file of kernels can fix this
#define PAGED_HAS_BOUNDS(options) ((options).bounded_rows > 0)
#endif
#endif
#endif

// True if a row keeps its first visible key. Without bounds it follows from the last one, which
// saves GPUs a register per row but costs the CPU a branch.
#ifdef PAGED_HOST
#define PAGED_KEEPS_FIRST(options) true
#else
#define PAGED_KEEPS_FIRST(options) PAGED_HAS_BOUNDS(options)
#endif

// True if a file of kernels supports options whose logits depend on the row (has_row_options). Most
// of NVIDIA's do not, which saves registers; csrc/cuda/variants.cpp then selects others.
#ifndef PAGED_SERVES_ROW_OPTIONS
#ifdef __CUDACC__
#define PAGED_SERVES_ROW_OPTIONS false
#else
#define PAGED_SERVES_ROW_OPTIONS true
#endif
#endif

#define PAGED_LOG2E 1.44269504088896340736f

namespace paged {

enum { WHOLE_CONTEXT = 0x7fffffff };  // a window without a limit

struct AttentionOptions {
  float scale;       // of the dot product; includes log2(e) unless there is a soft cap
  float softcap;     // scores become softcap * tanh(score / softcap); 0: none
  int window;        // keys in (position - window, position]
  int has_sinks;     // logits that join the softmax, one per query head
  int bounded_rows;  // row length of positions and bounds [3, num_rows]; 0: no bounds. A launch
                     // sets it: bounds belong to a step.
  int has_alibi;     // adds slope * (token - position), with a slope per query head
};
static_assert(sizeof(AttentionOptions) == 24, "the same for every compiler");

// First key that a query row sees, which may be negative, and last key.
struct RowBounds {
  int first;
  int last;
};

// `positions` is [num_rows], or with bounds [3, num_rows]. A row sees what its position and the
// window allow, and everything from its first to its last bound.
PAGED_HOOK RowBounds
bounds_of_row(PAGED_BUFFER int* positions, int row, PAGED_SHARED AttentionOptions& options) {
  RowBounds bounds;
  bounds.last = positions[row];
  bounds.first = PAGED_HAS_WINDOW(options) ? bounds.last - options.window + 1 : 0;
  if (PAGED_HAS_BOUNDS(options)) {
    int first = positions[options.bounded_rows + row];
    int last = positions[2 * options.bounded_rows + row];
    bounds.first = first < bounds.first ? first : bounds.first;
    bounds.last = last > bounds.last ? last : bounds.last;
  }
  return bounds;
}

// A row of the score matrix, as hooks see it.
struct AttentionRow {
  RowBounds bounds;
  int position;  // of the row's token; ALiBi only
  float slope;   // in base 2; ALiBi only
};

// `per_head` holds [num_q_heads] numbers for each option that needs them, in the order of the
// options' fields: sinks, ALiBi slopes.
PAGED_HOOK AttentionRow attention_row(
    PAGED_BUFFER int* positions, int row, PAGED_BUFFER float* per_head, int head, int num_q_heads,
    PAGED_SHARED AttentionOptions& options) {
  AttentionRow result;
  result.bounds = bounds_of_row(positions, row, options);
  result.position = 0;
  result.slope = 0.0f;
  if (PAGED_HAS_ALIBI(options)) {
    int first_slope = PAGED_HAS_SINKS(options) ? num_q_heads : 0;
    result.position = positions[row];
    result.slope = per_head[first_slope + head] * PAGED_LOG2E;
  }
  return result;
}

// A row that sees no token.
PAGED_HOOK AttentionRow no_row() {
  AttentionRow result;
  result.bounds.first = 0;
  result.bounds.last = -1;
  result.position = -1;
  result.slope = 0.0f;
  return result;
}

// True if the row sees the token.
PAGED_HOOK bool visible(AttentionRow row, int token, PAGED_SHARED AttentionOptions& options) {
  if (PAGED_KEEPS_FIRST(options)) {
    return token <= row.bounds.last && (!PAGED_HAS_WINDOW(options) || token >= row.bounds.first);
  }
  return token <= row.bounds.last &&
         (!PAGED_HAS_WINDOW(options) || token > row.bounds.last - options.window);
}

// The row-independent part of the logit of a scaled dot product. Value: a number or a vector of
// numbers; `Math` provides its tanh.
template <typename Math, typename Value>
PAGED_HOOK Value capped(Value scaled, PAGED_SHARED AttentionOptions& options) {
  if (PAGED_HAS_SOFTCAP(options)) {
    return options.softcap * PAGED_LOG2E * Math::tanh(scaled / options.softcap);
  }
  return scaled;
}

// Logit of the scaled dot product of a row and a token. Token: a position or a vector of positions;
// Math::distance subtracts the row's position from it.
template <typename Math, typename Value, typename Token>
PAGED_HOOK Value
logit(Value scaled, Token token, AttentionRow row, PAGED_SHARED AttentionOptions& options) {
  Value result = capped<Math>(scaled, options);
  if (PAGED_HAS_ALIBI(options)) {
    result += row.slope * Math::distance(token, row.position);
  }
  return result;
}

#ifdef PAGED_HOST
static inline bool operator==(const AttentionOptions& a, const AttentionOptions& b) {
  return __builtin_memcmp(&a, &b, sizeof(a)) == 0;
}

// True if a logit differs from the scaled dot product.
static inline bool changes_logits(const AttentionOptions& options) {
  return options.softcap > 0.0f || options.has_alibi;
}

// True if the logit of a scaled dot product depends on the row.
static inline bool has_row_options(const AttentionOptions& options) {
  return options.has_alibi;
}

// Bit i: function constant FIRST_FEATURE + i is true.
enum { FIRST_FEATURE = 4, NUM_FEATURES = 5, FEATURE_ALIBI = 1 << 4 };
static inline int features_of(const AttentionOptions& options) {
  return (options.window != WHOLE_CONTEXT) | (options.softcap > 0.0f) << 1 |
         (options.has_sinks != 0) << 2 | (options.bounded_rows > 0) << 3 |
         (options.has_alibi ? FEATURE_ALIBI : 0);
}

// Converts a user's options; 0 means no window or no soft cap.
static inline AttentionOptions attention_options(
    float scale, int window, float softcap, bool has_sinks, bool has_alibi) {
  AttentionOptions options = {};
  options.scale = softcap > 0.0f ? scale : scale * PAGED_LOG2E;
  options.softcap = softcap;
  options.window = window > 0 ? window : WHOLE_CONTEXT;
  options.has_sinks = has_sinks;
  options.has_alibi = has_alibi;
  return options;
}
#endif

}  // namespace paged
