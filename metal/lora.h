// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Low-rank adapters: base + (x @ a[adapter].T) @ b[adapter] with an adapter per row, for up to
// LORA_TARGETS products of one x. A threadgroup handles a tile of rows and reads an adapter's
// matrices once for all of them that have it. A row's sums do not depend on other rows.

#pragma once

#include <metal_stdlib>

#include "kernel_table.h"
#include "language.h"
#include "vector_load.h"

using namespace metal;

namespace paged {

enum { NO_ADAPTER = 0x7fffffff };

METAL_FUNC bool has_adapter(int adapter, constant LoraParams& params) {
  return adapter >= 0 && adapter < params.num_adapters;
}

// Loads the adapters of a tile's rows, NO_ADAPTER for rows without one.
METAL_FUNC void load_adapters(
    device const int* adapters, int first_row, constant LoraParams& params, thread int* chosen) {
  PAGED_UNROLL
  for (int i = 0; i < LORA_ROWS; i++) {
    int adapter = first_row + i < params.num_rows ? adapters[first_row + i] : NO_ADAPTER;
    chosen[i] = has_adapter(adapter, params) ? adapter : NO_ADAPTER;
  }
}

// Returns the first of a tile's adapters from `adapter` on; NO_ADAPTER if there is none.
METAL_FUNC int next_adapter(thread const int* chosen, int adapter) {
  int next = NO_ADAPTER;
  PAGED_UNROLL
  for (int i = 0; i < LORA_ROWS; i++) {
    next = chosen[i] >= adapter ? min(next, chosen[i]) : next;
  }
  return next;
}

// Adds the halves of SIMD-groups: lanes whose bit HALF is set keep the second HALF of their values.
template <int HALF>
METAL_FUNC void add_halves(thread float* values, uint lane) {
  bool is_upper = (lane & uint(HALF)) != 0;
  PAGED_UNROLL
  for (int i = 0; i < HALF; i++) {
    float low = values[i];
    float high = values[i + HALF];
    float given = is_upper ? low : high;
    values[i] = (is_upper ? high : low) + simd_shuffle_xor(given, ushort(HALF));
  }
}

// Returns to lane l the SIMD-group's sum of values[l], with 31 shuffles for all 32 sums.
METAL_FUNC float sum_of_lane(thread float* values, uint lane) {
  add_halves<16>(values, lane);
  add_halves<8>(values, lane);
  add_halves<4>(values, lane);
  add_halves<2>(values, lane);
  add_halves<1>(values, lane);
  return values[0];
}

// WIDTH neighboring elements of a row: a chunk, or one element of a row that is not made of chunks.
// Result: the order in which chunks are written.
template <typename T, int WIDTH, typename Result = InPlace>
struct Neighbors {
  uint4 bits;

  METAL_FUNC void load(device const T* from) thread { bits = *(device const uint4*)from; }
  METAL_FUNC void get(thread float* out) const thread { unpack(bits, out, T(0.0f)); }
  METAL_FUNC static void store(device T* row, int column, thread const float* values) {
    Result::write((device uint4*)row, column / WIDTH, pack(values, T(0.0f)));
  }
};

template <typename T, typename Result>
struct Neighbors<T, 1, Result> {
  T value;

  METAL_FUNC void load(device const T* from) thread { value = *from; }
  METAL_FUNC void get(thread float* out) const thread { out[0] = float(value); }
  METAL_FUNC static void store(device T* row, int column, thread const float* values) {
    row[column] = T(values[0]);
  }
};

}  // namespace paged

// Computes hidden = x @ a[adapter].T in fp32: [targets, rows, parts of k, rank], where a part has
// LORA_DOWN_THREADS chunks. Tiles without adapters are not written. Rows: the order of x's columns.
// grid: (parts * (rank / LORA_COLUMNS rounded up), rows / LORA_ROWS rounded up, targets).
template <typename T, typename Rows = paged::InPlace>
PAGED_KERNEL(paged::LORA_DOWN_THREADS)
lora_down(
    device const T* x [[buffer(0)]], device const int* adapters [[buffer(1)]],
    device const T* a_0 [[buffer(2)]], device const T* a_1 [[buffer(3)]],
    device const T* a_2 [[buffer(4)]], device float* hidden [[buffer(5)]],
    constant paged::LoraParams& params [[buffer(6)]],
    threadgroup float* sums_of_groups PAGED_SCRATCH, PAGED_THREAD_POSITION, PAGED_SIMD_POSITION) {
  using namespace paged;
  constexpr int CHUNK = chunk_size<T>();
  int target = int(group_id.z);
  int part = int(group_id.x) % params.num_parts;
  int first_column = int(group_id.x) / params.num_parts * LORA_COLUMNS;
  int first_row = int(group_id.y) * LORA_ROWS;
  int chosen[LORA_ROWS];
  load_adapters(adapters, first_row, params, chosen);
  int adapter = next_adapter(chosen, 0);
  if (adapter == NO_ADAPTER) {
    return;
  }
  device const T* a = target == 0 ? a_0 : target == 1 ? a_1 : a_2;
  int chunk = part * LORA_DOWN_THREADS + int(thread_id);
  float sums[LORA_ROWS * LORA_COLUMNS];
  PAGED_UNROLL
  for (int i = 0; i < LORA_ROWS * LORA_COLUMNS; i++) {
    sums[i] = 0.0f;
  }
  if (chunk < params.k / CHUNK) {
    float values[LORA_ROWS][CHUNK];
    PAGED_UNROLL
    for (int i = 0; i < LORA_ROWS; i++) {
      if (chosen[i] != NO_ADAPTER) {
        device const T* row = x + ulong(first_row + i) * params.k;
        unpack(Rows::read((device const uint4*)row, chunk), values[i], T(0.0f));
      }
    }
    for (; adapter != NO_ADAPTER; adapter = next_adapter(chosen, adapter + 1)) {
      device const T* of_adapter = a + ulong(adapter) * params.rank * params.k;
      uint4 loaded[LORA_COLUMNS];
      PAGED_UNROLL
      for (int c = 0; c < LORA_COLUMNS; c++) {
        int column = min(first_column + c, params.rank - 1);
        loaded[c] = ((device const uint4*)(of_adapter + ulong(column) * params.k))[chunk];
      }
      PAGED_UNROLL
      for (int c = 0; c < LORA_COLUMNS; c++) {
        float weights[CHUNK];
        unpack(loaded[c], weights, T(0.0f));
        PAGED_UNROLL
        for (int i = 0; i < LORA_ROWS; i++) {
          if (chosen[i] == adapter) {
            PAGED_UNROLL
            for (int e = 0; e < CHUNK; e++) {
              sums[i * LORA_COLUMNS + c] += values[i][e] * weights[e];
            }
          }
        }
      }
    }
  }
  sums_of_groups[simd_id * 32 + lane] = sum_of_lane(sums, lane);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  int row = first_row + int(lane) / LORA_COLUMNS;
  int column = first_column + int(lane) % LORA_COLUMNS;
  if (simd_id > 0 || row >= params.num_rows || column >= params.rank) {
    return;
  }
  float sum = 0.0f;
  for (int i = 0; i < int(group_size.x) / 32; i++) {
    sum += sums_of_groups[i * 32 + int(lane)];
  }
  int row_of_target = target * params.num_rows + row;
  hidden[(ulong(row_of_target) * params.num_parts + part) * params.rank + column] = sum;
}

namespace paged {

// The rank with padding to whole steps, whose hidden values are zeros.
METAL_FUNC int staged_rank(constant LoraParams& params) {
  return (params.rank + LORA_STEP - 1) / LORA_STEP * LORA_STEP;
}

// Computes base + hidden @ b[adapter] of a tile's rows, rounded to T, for the columns from `column`
// on. hidden: [LORA_ROWS, staged_rank].
template <typename T, int WIDTH>
METAL_FUNC void adapted_columns(
    device const T* base, device const T* b, threadgroup const float* hidden,
    thread const int* chosen, int first_row, int n, int column, constant LoraParams& params,
    thread float* out) {
  Neighbors<T, WIDTH> bases[LORA_ROWS];
  float sums[LORA_ROWS][WIDTH];
  PAGED_UNROLL
  for (int i = 0; i < LORA_ROWS; i++) {
    bases[i].load(base + ulong(min(first_row + i, params.num_rows - 1)) * n + column);
    PAGED_UNROLL
    for (int e = 0; e < WIDTH; e++) {
      sums[i][e] = 0.0f;
    }
  }
  int adapter = next_adapter(chosen, 0);
  for (; adapter != NO_ADAPTER; adapter = next_adapter(chosen, adapter + 1)) {
    device const T* row_of_b = b + ulong(adapter) * params.rank * n + column;
    for (int first = 0; first < params.rank; first += LORA_STEP) {
      Neighbors<T, WIDTH> loaded[LORA_STEP];
      PAGED_UNROLL
      for (int s = 0; s < LORA_STEP; s++) {
        loaded[s].load(row_of_b);
        row_of_b += first + s + 1 < params.rank ? n : 0;  // then the hidden value is zero
      }
      PAGED_UNROLL
      for (int s = 0; s < LORA_STEP; s++) {
        float weights[WIDTH];
        loaded[s].get(weights);
        PAGED_UNROLL
        for (int i = 0; i < LORA_ROWS; i++) {
          if (chosen[i] == adapter) {
            float factor = hidden[i * staged_rank(params) + first + s];
            PAGED_UNROLL
            for (int e = 0; e < WIDTH; e++) {
              sums[i][e] += factor * weights[e];
            }
          }
        }
      }
    }
  }
  PAGED_UNROLL
  for (int i = 0; i < LORA_ROWS; i++) {
    bases[i].get(out + i * WIDTH);
    if (chosen[i] != NO_ADAPTER) {
      PAGED_UNROLL
      for (int e = 0; e < WIDTH; e++) {
        out[i * WIDTH + e] = rounded<T>(out[i * WIDTH + e] + sums[i][e]);
      }
    }
  }
}

// The arrays of one target.
template <typename T>
struct LoraTarget {
  device const T* base;
  device const T* b;
  device T* out;
};

// Writes a tile's rows of the columns from `column` on. second: the target that silu(target)
// multiplies, if params.is_gated.
template <typename T, int WIDTH, typename Result>
METAL_FUNC void write_adapted(
    LoraTarget<T> target, LoraTarget<T> second, device const T* residual,
    threadgroup const float* hidden, thread const int* chosen, int first_row, int n, int column,
    constant LoraParams& params) {
  float gates[LORA_ROWS * WIDTH];
  float values[LORA_ROWS * WIDTH];
  PAGED_UNROLL
  for (int e = 0; e < LORA_ROWS * WIDTH; e++) {
    values[e] = 0.0f;
  }
  device const T* base = target.base;
  device const T* b = target.b;
  // One loop rather than two calls, because it takes time to load code.
  for (int i = 0; i <= (params.is_gated ? 1 : 0); i++) {
    PAGED_UNROLL
    for (int e = 0; e < LORA_ROWS * WIDTH; e++) {
      gates[e] = values[e];
    }
    adapted_columns<T, WIDTH>(
        base, b, hidden + i * LORA_ROWS * staged_rank(params), chosen, first_row, n, column, params,
        values);
    base = second.base;
    b = second.b;
  }
  if (params.is_gated) {
    PAGED_UNROLL
    for (int e = 0; e < LORA_ROWS * WIDTH; e++) {
      values[e] *= gates[e] / (1.0f + precise::exp(-gates[e]));
    }
  }
  PAGED_UNROLL
  for (int i = 0; i < LORA_ROWS; i++) {
    if (first_row + i < params.num_rows) {
      ulong row = ulong(first_row + i) * n;
      if (params.has_residual) {
        Neighbors<T, WIDTH> loaded;
        float added[WIDTH];
        loaded.load(residual + row + column);
        loaded.get(added);
        PAGED_UNROLL
        for (int e = 0; e < WIDTH; e++) {
          values[i * WIDTH + e] += added[e];
        }
      }
      Neighbors<T, WIDTH, Result>::store(target.out + row, column, values + i * WIDTH);
    }
  }
}

}  // namespace paged

// Computes out = base + hidden @ b[adapter] of each target, or silu(out_0) * out_1 of two targets
// (is_gated), and adds a residual to the first one. Rows without an adapter keep their base's bits.
// grid: (chunks of the widest row / LORA_UP_THREADS rounded up, rows / LORA_ROWS rounded up,
// targets, or 1 if gated).
template <typename T, typename Result = paged::InPlace>
PAGED_KERNEL(paged::LORA_UP_THREADS)
lora_up(
    device const T* base_0 [[buffer(0)]], device const T* base_1 [[buffer(1)]],
    device const T* base_2 [[buffer(2)]], device const float* hidden [[buffer(3)]],
    device const int* adapters [[buffer(4)]], device const T* b_0 [[buffer(5)]],
    device const T* b_1 [[buffer(6)]], device const T* b_2 [[buffer(7)]],
    device const T* residual [[buffer(8)]], device T* out_0 [[buffer(9)]],
    device T* out_1 [[buffer(10)]], device T* out_2 [[buffer(11)]],
    constant paged::LoraParams& params [[buffer(12)]], threadgroup float* staged PAGED_SCRATCH,
    PAGED_THREAD_POSITION) {
  using namespace paged;
  constexpr int CHUNK = chunk_size<T>();
  int first_target = int(group_id.z);
  int first_row = int(group_id.y) * LORA_ROWS;
  int rank = staged_rank(params);
  int num_staged = (params.is_gated ? 2 : 1) * LORA_ROWS * rank;
  for (int i = int(thread_id); i < num_staged; i += int(group_size.x)) {
    int target = first_target + i / rank / LORA_ROWS;
    int row = first_row + i / rank % LORA_ROWS;
    int column = i % rank;
    float sum = 0.0f;
    if (column < params.rank && row < params.num_rows && has_adapter(adapters[row], params)) {
      device const float* parts =
          hidden + ulong(target * params.num_rows + row) * params.num_parts * params.rank;
      for (int part = 0; part < params.num_parts; part++) {
        sum += parts[part * params.rank + column];
      }
    }
    staged[i] = sum;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  LoraTarget<T> target = {base_0, b_0, out_0};
  LoraTarget<T> second = {base_1, b_1, out_1};
  LoraTarget<T> third = {base_2, b_2, out_2};
  int n = params.n_0;
  if (first_target == 1) {
    target = second;
    n = params.n_1;
  } else if (first_target == 2) {
    target = third;
    n = params.n_2;
  }
  int chosen[LORA_ROWS];
  load_adapters(adapters, first_row, params, chosen);
  int column = int(group_id.x * group_size.x + thread_id) * CHUNK;
  if (n % CHUNK != 0) {
    for (int c = column; c < min(column + CHUNK, n); c++) {
      write_adapted<T, 1, Result>(
          target, second, residual, staged, chosen, first_row, n, c, params);
    }
  } else if (column < n) {
    write_adapted<T, CHUNK, Result>(
        target, second, residual, staged, chosen, first_row, n, column, params);
  }
}
