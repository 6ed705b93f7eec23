// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Computes blocks of rows x columns with one vector of partial sums per element, so both operands
// are read along k in place. Compiled once per instruction set; see simd.h.

#pragma once

#include "product.h"
#include "simd.h"
#include "sums.h"
#include "unpack_kernel.h"

namespace mlx_paged::cpu::MLX_PAGED_ISA {

// Blocks as large as the registers hold. With few rows, weights are widened in registers, once per
// block of rows, because that costs less than storing them.
constexpr int kBlockRows = 4;
#if defined(__AVX512F__)
constexpr int kBlockColumns = 4;
constexpr int kPackedColumns = 4;  // unpacked at once
constexpr int kMaxWidenedRows = 8;
constexpr int kMaxFusedRows = 8;
#elif defined(__AVX2__)
constexpr int kBlockColumns = 3;
constexpr int kPackedColumns = 12;  // so that rows are read from the L2 cache less often
constexpr int kMaxWidenedRows = 4;
constexpr int kMaxFusedRows = 3;
#else
constexpr int kBlockColumns = 2;
constexpr int kPackedColumns = 2;
#endif
constexpr int kMaxProductRows = kWidth >= 8 ? 64 : 0;  // few registers
constexpr int kMaxPackedRows = kMaxProductRows > 16 ? kMaxProductRows : 16;

// Prefetches `Ahead` vectors for each vector along k, so that memory is read in one long run while
// the block is computed: four short parallel runs are too short for the hardware prefetcher. T: the
// weights' type.
template <int Rows, int Columns, int Ahead, typename T>
inline void product_block(const ProductArgs& args, int64_t row, int64_t column, const T*& ahead) {
  const float* a = args.a + row * args.lda;
  int k_size = args.weights.k;
  int64_t ldb = args.weights.row_bytes / int64_t(sizeof(T));
  const T* b = static_cast<const T*>(args.weights.data) + column * ldb;
  VecF sums[Rows][Columns] = {};
  auto add = [&](auto load_at) {
    VecF columns[Columns];
    for (int j = 0; j < Columns; j++) {
      columns[j] = load_at(b + j * ldb);
    }
    for (int j = 0; j < Ahead; j++) {
      __builtin_prefetch(ahead, 0, 2);
      ahead += kWidth;
    }
    for (int i = 0; i < Rows; i++) {
      VecF x = load_at(a + i * args.lda);
      for (int j = 0; j < Columns; j++) {
        sums[i][j] += x * columns[j];
      }
    }
  };
  int k = 0;
  for (; k + kWidth <= k_size; k += kWidth) {
    add([k](const auto* p) { return load(p + k); });
  }
  if (k < k_size) {
    add([&](const auto* p) { return load_tail(p + k, k_size - k); });
  }
  store_sums(sums, args.c + row * args.ldc + column, args.ldc);
}

// Computes all rows of some columns. The first blocks of rows prefetch the columns after them,
// `Ahead` vectors at a time.
template <int Columns, int Ahead, typename T>
inline void product_rows(const ProductArgs& args, int64_t column) {
  auto ahead = reinterpret_cast<const T*>(
      static_cast<const char*>(args.weights.data) + (column + Columns) * args.weights.row_bytes);
  int row = 0;
  for (int fetched = 0; row + kBlockRows <= args.rows; row += kBlockRows, fetched += Ahead) {
    if (fetched < Columns) {
      product_block<kBlockRows, Columns, Ahead>(args, row, column, ahead);
    } else {
      product_block<kBlockRows, Columns, 0>(args, row, column, ahead);
    }
  }
  switch (args.rows - row) {
    case 1:
      return product_block<1, Columns, Ahead>(args, row, column, ahead);
    case 2:
      return product_block<2, Columns, Ahead>(args, row, column, ahead);
    case 3:
      return product_block<3, Columns, Ahead>(args, row, column, ahead);
  }
}

template <int Columns, typename T>
inline void product_columns(const ProductArgs& args, int64_t column) {
  if (args.rows <= kBlockRows) {
    product_rows<Columns, Columns, T>(args, column);
  } else if (args.rows < Columns * kBlockRows) {
    product_rows<Columns, (Columns + 1) / 2, T>(args, column);
  } else {
    product_rows<Columns, 1, T>(args, column);
  }
}

// Multiplies dense weights in place.
template <typename T>
inline void dense_rows(const ProductArgs& args, int64_t begin, int64_t end) {
  int64_t column = begin;
  for (; column + kBlockColumns <= end; column += kBlockColumns) {
    product_columns<kBlockColumns, T>(args, column);
  }
  for (; column < end; column++) {
    product_columns<1, T>(args, column);
  }
}

// Other weight formats: unpacks some columns to the L1 cache, a part of k at a time, and multiplies
// all rows by them.
constexpr int kPart = 512;  // elements: whole groups

template <int Rows, int Columns>
inline void part_block(
    const float* a, int64_t lda, const float* tile, int count, VecF (*sums)[Columns]) {
  VecF s[Rows][Columns];
  for (int i = 0; i < Rows; i++) {
    for (int j = 0; j < Columns; j++) {
      s[i][j] = sums[i][j];
    }
  }
  auto add = [&](int k, auto load_x) {
    VecF columns[Columns];
    for (int j = 0; j < Columns; j++) {
      columns[j] = load(tile + j * kPart + k);
    }
    for (int i = 0; i < Rows; i++) {
      VecF x = load_x(a + i * lda + k);
      for (int j = 0; j < Columns; j++) {
        s[i][j] += x * columns[j];
      }
    }
  };
  int k = 0;
  for (; k + kWidth <= count; k += kWidth) {
    add(k, [](const float* p) { return load(p); });
  }
  if (k < count) {
    add(k, [&](const float* p) { return load_tail(p, count - k); });
  }
  for (int i = 0; i < Rows; i++) {
    for (int j = 0; j < Columns; j++) {
      sums[i][j] = s[i][j];
    }
  }
}

// Requires rows <= kMaxPackedRows.
template <int Columns>
inline void packed_columns(const ProductArgs& args, int row, int rows, int64_t column) {
  constexpr int kBlock = Columns < kBlockColumns ? Columns : kBlockColumns;
  constexpr int kBlocks = Columns / kBlock;
  alignas(64) float tile[Columns * kPart];
  VecF sums[kBlocks][kMaxPackedRows][kBlock];
  for (auto& block : sums) {
    __builtin_memset(block, 0, sizeof(block[0]) * rows);
  }
  const WeightView& w = args.weights;
  for (int begin = 0; begin < w.k; begin += kPart) {
    int count = w.k - begin < kPart ? w.k - begin : kPart;
    for (int j = 0; j < Columns; j++) {
      // Prefetches the next columns while these are computed.
      auto next = static_cast<const char*>(w.data) + (column + Columns + j) * w.row_bytes +
                  int64_t(begin) * w.bits / 8;
      for (int byte = 0; byte < count * w.bits / 8; byte += 64) {
        __builtin_prefetch(next + byte, 0, 2);
      }
      unpack_row(w, column + j, begin, count, tile + j * kPart);
      if (int tail = count % kWidth) {
        __builtin_memset(tile + j * kPart + count, 0, (kWidth - tail) * sizeof(float));
      }
    }
    const float* a = args.a + row * args.lda + begin;
    auto blocks = [&](int i, auto block) {
      for (int b = 0; b < kBlocks; b++) {
        block(a + i * args.lda, args.lda, tile + b * kBlock * kPart, count, sums[b] + i);
      }
    };
    int i = 0;
    for (; i + kBlockRows <= rows; i += kBlockRows) {
      blocks(i, part_block<kBlockRows, kBlock>);
    }
    switch (rows - i) {
      case 1:
        blocks(i, part_block<1, kBlock>);
        break;
      case 2:
        blocks(i, part_block<2, kBlock>);
        break;
      case 3:
        blocks(i, part_block<3, kBlock>);
        break;
    }
  }
  for (int i = 0; i < rows; i++) {
    for (int b = 0; b < kBlocks; b++) {
      auto& one = reinterpret_cast<VecF(&)[1][kBlock]>(sums[b][i]);
      store_sums(one, args.c + (row + i) * args.ldc + column + b * kBlock, args.ldc);
    }
  }
}

#if defined(__AVX2__)
// Affine weights of 4 or 8 bits with few rows. Same order as packed_columns, same bits.
template <int Bits, typename T, int Rows, int Columns>
inline void fused_block(const ProductArgs& args, int64_t row, int64_t column) {
  constexpr int kGroups = kWidth;  // groups whose scales are widened at once
  const WeightView& w = args.weights;
  const int groups = w.k / w.group_size;
  const float* a = args.a + row * args.lda;
  const uint8_t* p[Columns];
  const T* scales[Columns];
  const T* biases[Columns];
  for (int j = 0; j < Columns; j++) {
    p[j] = static_cast<const uint8_t*>(w.data) + (column + j) * w.row_bytes;
    scales[j] = static_cast<const T*>(w.scales) + (column + j) * groups;
    biases[j] = static_cast<const T*>(w.biases) + (column + j) * groups;
  }
  constexpr uint32_t kMask = (1u << Bits) - 1;
  alignas(64) float scale[Columns][kGroups];
  alignas(64) float bias[Columns][kGroups];
  VecF sums[Rows][Columns] = {};
  for (int first = 0; first < groups; first += kGroups) {
    const int count = groups - first < kGroups ? groups - first : kGroups;
    for (int j = 0; j < Columns; j++) {
      const bool whole = count == kGroups;
      store(scale[j], whole ? load(scales[j] + first) : load_tail(scales[j] + first, count));
      store(bias[j], whole ? load(biases[j] + first) : load_tail(biases[j] + first, count));
    }
    for (int g = 0; g < count; g++) {
#if defined(__AVX512F__)
      const VecU index = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
      VecF table[Columns];
      for (int j = 0; Bits == 4 && j < Columns; j++) {
        table[j] = to_float(index) * scale[j][g] + bias[j][g];
      }
#endif
      for (int j = 0; j < Columns; j++) {
        __builtin_prefetch(p[j] + Columns * w.row_bytes, 0, 2);
      }
      for (int k = 0; k < w.group_size; k += kWidth, a += kWidth) {
        for (int j = 0; j < Columns; j++) {
          VecF value;
#if defined(__AVX512F__)
          if constexpr (Bits == 4) {
            value = Table(table[j])(spread<4>(p[j], 0));
          } else
#endif
          {
            value = to_float(spread<Bits>(p[j], 0) & kMask) * scale[j][g] + bias[j][g];
          }
          p[j] += kWidth * Bits / 8;
          for (int i = 0; i < Rows; i++) {
            sums[i][j] += load(a + i * args.lda) * value;
          }
        }
      }
    }
  }
  store_sums(sums, args.c + row * args.ldc + column, args.ldc);
}

template <int Bits, typename T, int Columns>
inline void fused_columns(const ProductArgs& args, int64_t column) {
  int row = 0;
  for (; row + kBlockRows <= args.rows; row += kBlockRows) {
    fused_block<Bits, T, kBlockRows, Columns>(args, row, column);
  }
  switch (args.rows - row) {
    case 1:
      return fused_block<Bits, T, 1, Columns>(args, row, column);
    case 2:
      return fused_block<Bits, T, 2, Columns>(args, row, column);
    case 3:
      return fused_block<Bits, T, 3, Columns>(args, row, column);
  }
}

template <int Bits>
inline void fused_rows(const ProductArgs& args, int64_t begin, int64_t end) {
  with_type(args.weights.dtype, [&](auto type) {
    using T = decltype(type);
    int64_t column = begin;
    for (; column + kBlockColumns <= end; column += kBlockColumns) {
      fused_columns<Bits, T, kBlockColumns>(args, column);
    }
    for (; column < end; column++) {
      fused_columns<Bits, T, 1>(args, column);
    }
  });
}
#endif

inline void packed_rows(const ProductArgs& args, int64_t begin, int64_t end) {
#if defined(__AVX2__)
  const WeightView& w = args.weights;
  if (w.format == WeightFormat::affine && args.rows <= kMaxFusedRows) {
    if (w.bits == 4) {
      return fused_rows<4>(args, begin, end);
    } else if (w.bits == 8) {
      return fused_rows<8>(args, begin, end);
    }
  }
#endif
  for (int row = 0; row < args.rows; row += kMaxPackedRows) {
    int rows = args.rows - row < kMaxPackedRows ? args.rows - row : kMaxPackedRows;
    int64_t column = begin;
    for (; column + kPackedColumns <= end; column += kPackedColumns) {
      packed_columns<kPackedColumns>(args, row, rows, column);
    }
    for (; column < end; column++) {
      packed_columns<1>(args, row, rows, column);
    }
  }
}

inline void few_rows(const ProductArgs& args, int64_t begin, int64_t end) {
  const WeightView& w = args.weights;
  // With many rows all weights are copied, float32 too for cache locality; same order, same bits.
  const bool is_dense = w.format == WeightFormat::dense;
  if (is_dense && w.dtype == DType::float32 && args.rows <= kMaxPackedRows) {
    return dense_rows<float>(args, begin, end);
  }
#if defined(__AVX2__)
  if (is_dense && args.rows <= kMaxWidenedRows) {
    return w.dtype == DType::bfloat16 ? dense_rows<BFloat>(args, begin, end)
                                      : dense_rows<Half>(args, begin, end);
  }
#endif
  packed_rows(args, begin, end);
}

}  // namespace mlx_paged::cpu::MLX_PAGED_ISA
