// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Products of up to 16 rows with a weight, whose rows a SIMD-group reads once for all of them.
//
// A `Weight` is the share of one lane in a row of the weight: a unit of consecutive elements. Lane
// i takes units i, i + 32, ... and adds their elements in order, then the lanes' sums are added.
// The number of rows and of columns per SIMD-group does not change that order, so a row has the
// same bits in any batch.

#pragma once

#include <metal_stdlib>

#include "kernel_table.h"
#include "language.h"
#include "vector_load.h"

using namespace metal;

namespace paged {

// Rows of a weight, dense or quantized, that are read together.
struct WeightRows {
  device const uchar* elements;  // of all rows, or their codes
  device const uchar* scales;
  device const uchar* biases;
  ulong first;  // row
  int row_units;
  int group_shift;  // log2 of the units per group of a scale

  METAL_FUNC ulong first_unit() const thread { return first * row_units; }
};

// 16 bytes of a dense weight.
template <typename T>
struct DenseWeight {
  uint4 elements;

  METAL_FUNC static constexpr int unit_size() { return chunk_size<T>(); }

  // Loads a unit, counted from the first of `rows`, if it exists. In this and in all weights, every
  // lane of a SIMD-group calls it, and neighboring lanes have neighboring units of one row.
  METAL_FUNC void load(WeightRows rows, uint unit, bool exists, int) thread {
    if (exists) {
      elements = ((device const uint4*)rows.elements + rows.first_unit())[unit];
    }
  }

  // The same by a lane alone; the unit exists.
  METAL_FUNC void load_alone(WeightRows rows, uint unit) thread { load(rows, unit, true, 0); }

  METAL_FUNC void unpack_chunk(int, thread float* out) const thread {
    unpack(elements, out, T(0.0f));
  }

  METAL_FUNC uint4 packed_chunk(int) const thread { return elements; }
};

// Rows of x that a product skips together if none of them exists.
template <int ROWS>
METAL_FUNC constexpr int rows_at_once() {
  return ROWS < 2 ? ROWS : 2;
}

// Multiplies the rows of x listed in the first `count` entries of `rows` by the first
// `num_columns` rows of `weight`. Each lane returns a partial sum per row and column;
// the sums of the lanes are the products. `rows` lists existing rows past `count`, too.
template <typename T, typename Weight, int ROWS>
METAL_FUNC void multiply_rows(
    WeightRows weight, int num_columns, device const T* x, int x_stride,
    thread const int (&rows)[ROWS], int count, int lane,
    thread float (&sums)[ROWS][product_columns(ROWS)]) {
  constexpr int COLUMNS = product_columns(ROWS);
  constexpr int CHUNK = chunk_size<T>();
  constexpr int CHUNKS = Weight::unit_size() / CHUNK;
  constexpr int AT_ONCE = rows_at_once<ROWS>();
  uint row_chunks = uint(x_stride / CHUNK);
  PAGED_UNROLL
  for (int i = 0; i < ROWS; i++) {
    PAGED_UNROLL
    for (int c = 0; c < COLUMNS; c++) {
      sums[i][c] = 0.0f;
    }
  }
  for (int begin_unit = 0; begin_unit < weight.row_units; begin_unit += 32) {
    int unit = begin_unit + lane;
    bool exists = unit < weight.row_units;
    Weight weights[COLUMNS] = {};
    PAGED_UNROLL
    for (int c = 0; c < COLUMNS; c++) {
      if (c < num_columns) {
        weights[c].load(weight, uint(c * weight.row_units + unit), exists, lane);
      }
    }
    if (!exists) {
      break;
    }
    PAGED_UNROLL
    for (int chunk = 0; chunk < CHUNKS; chunk++) {
      float w[COLUMNS][CHUNK];
      PAGED_UNROLL
      for (int c = 0; c < COLUMNS; c++) {
        weights[c].unpack_chunk(chunk, w[c]);
      }
      PAGED_UNROLL
      for (int begin = 0; begin < ROWS; begin += AT_ONCE) {
        if (begin < count) {
          PAGED_UNROLL
          for (int i = begin; i < begin + AT_ONCE; i++) {
            float v[CHUNK];
            uint at = uint(rows[i]) * row_chunks + uint(unit * CHUNKS + chunk);
            unpack(((device const uint4*)x)[at], v, T(0.0f));
            PAGED_UNROLL
            for (int e = 0; e < CHUNK; e++) {
              PAGED_UNROLL
              for (int c = 0; c < COLUMNS; c++) {
                // Not left to the compiler, which could contract some instantiations only.
                sums[i][c] = fma(w[c][e], v[e], sums[i][c]);
              }
            }
          }
        }
      }
    }
  }
}

}  // namespace paged
