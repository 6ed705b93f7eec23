// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Products of many rows of int8 activations with AMX tiles. One tile product gives all sums of a
// group, so scaling them takes longer than multiplying. While tile instructions are in flight, the
// processor scales one vector of 16 floats per cycle instead of two. So a unit of work keeps its
// sums in registers for a quarter of the groups, and tiles run some units ahead.

#pragma once

#include "amx_operands.h"

namespace mlx_paged::cpu::MLX_PAGED_ISA {

// Multiplies blocks of `Rows` rows by up to 16 * Vectors columns. A unit is the products of one
// group and 16 columns; units follow each other as groups, vectors and blocks do.
template <int Bits, int Group, int Rows, int Vectors, typename Tiles>
class AmxDigitRows {
 public:
  using Block = RowBlock<Bits, 1, Group>;
  using Codes = CodeTiles<Bits, 1, Group, Vectors>;
  static_assert(Codes::kByVectors);

  // Units come in pairs, with tiles of their own.
  static constexpr int kWeights = 2;
  static constexpr int kSums = 4;

  static void configure(TileShape (&shapes)[kNumTiles]) {
    for (int i = 0; i < 2; i++) {
      shapes[i] = {Rows, Block::kRowBytes};
      shapes[kWeights + i] = {Codes::kRows, kTileRowBytes};
      shapes[kSums + i] = {Rows, kTileRowBytes};
    }
  }

  AmxDigitRows(Tiles& tiles, const IntegerProductArgs& args, const Codes& codes, int first)
      : tiles_(tiles), args_(args), codes_(codes), first_(first) {
    const GroupOrder<Group> order(args.weights.k, args.rows);
    all_groups_ = order.groups;
    groups_ = order.in_chunk(first);
    is_last_ = first + groups_ == order.groups;
    // With several chunks, each block's sums need memory between them.
    memory_stride_ = order.in_chunk(0) < order.groups ? kPanelSums : 0;
  }

  // Adds the products of a chunk of groups for rows [begin, end). The last block of rows may be
  // incomplete.
  __attribute__((noinline)) void run(int begin, int end, int64_t column, int columns) {
    x_ = first_x_ =
        static_cast<const Block*>(args_.x) + int64_t(begin / kRowBlock) * all_groups_ + first_;
    vectors_ = (columns + kWidth - 1) / kWidth;
    group_ = vector_ = block_ = 0;
    blocks_ = (end - begin + Rows - 1) / Rows;
    codes_at_ = codes_.codes();
    num_issued_ = num_scaled_ = 0;
    while (num_issued_ < kLag) {
      issue_pair();
    }
    for (int row = begin; row < end; row += Rows) {
      const int block = row / kRowBlock;
      const Block* x = first_x_ + (block - begin / kRowBlock) * int64_t(all_groups_);
      for (int v = 0; v < vectors_; v++) {
        float* sums = codes_.end() + block * memory_stride_ + v * Rows * kWidth;
        float* to = args_.c + row * args_.ldc + column + v * kWidth;
        add_vector(x, v, sums, to, end - row < Rows ? end - row : Rows, columns - v * kWidth);
      }
    }
  }

 private:
  static constexpr int kAhead = 4;         // units between a store and its loads
  static constexpr int kLag = 2 + kAhead;  // a pair waits in tiles
  static constexpr unsigned kRing = 8;     // units
  static constexpr int kQuarterStride = Vectors * Rows * kWidth;

  // Adds the products of a vector to its four sums. After the last chunk, stores the results of
  // `rows` rows and up to `columns` columns.
  __attribute__((always_inline)) void add_vector(
      const Block* x, int v, float* sums, float* to, int rows, int columns) {
    // Copies: the compiler reads members again after each tile instruction.
    const float* first_scales = codes_.scales(0, v);
    const int shift = group_shift<Group>(args_.weights.group_size);
    const int first = first_, groups = groups_;
    const bool is_last = is_last_;
    for (int quarter = 0; quarter < kIntegerGroups; quarter++, sums += kQuarterStride) {
      VecF total[Rows];
#pragma GCC unroll 16
      for (int i = 0; i < Rows; i++) {
        total[i] = first == 0 ? VecF{} : load(sums + i * kWidth);
      }
      for (int g = quarter; g < groups; g += kIntegerGroups, x++) {
        if (num_scaled_ % 2 == 0) {
          issue_pair();
        }
        const auto& products = ring_[num_scaled_++ % kRing];
        const float* scales =
            first_scales + int64_t((first + g) >> shift) * 2 * kIntegerTileColumns;
        const VecF scale = load(scales);
        const VecF bias = load(scales + kIntegerTileColumns);
#pragma GCC unroll 16
        for (int i = 0; i < Rows; i++) {
          const VecF scaled = to_float((VecU)load_as<VecI>(products[i])) * x->scales[i];
          total[i] += scaled * scale;
          total[i] += x->sums[i] * bias;
        }
      }
      // (0 + 1) + (2 + 3)
      if (is_last && quarter % 2 == 1) {
#pragma GCC unroll 16
        for (int i = 0; i < Rows; i++) {
          total[i] = load(sums - kQuarterStride + i * kWidth) + total[i];
        }
      }
      if (is_last && quarter == kIntegerGroups - 1) {
        const __mmask16 mask = columns < kWidth ? (1u << columns) - 1 : 0xffff;
#pragma GCC unroll 16
        for (int i = 0; i < Rows; i++, to += args_.ldc) {
          if (i < rows) {
            const VecF sum = load(sums - 2 * kQuarterStride + i * kWidth) + total[i];
            _mm512_mask_storeu_ps(to, mask, (__m512)sum);
          }
        }
        return;
      }
#pragma GCC unroll 16
      for (int i = 0; i < Rows; i++) {
        store(sums + i * kWidth, total[i]);
      }
    }
  }

  __attribute__((always_inline)) void issue_pair() {
    issue<0>();
    issue<1>();
    num_issued_ += 2;
  }

  // Begins a unit, and stores the sums of the one two units before.
  template <int Parity>
  __attribute__((always_inline)) void issue() {
    tiles_.template load<kWeights + Parity>(codes_at_, kTileRowBytes);
    tiles_.template load<Parity>(x_->digits[0][0], Block::kRowBytes);
    tiles_.template store<kSums + Parity>(ring_[(num_issued_ + Parity - 2) % kRing], kTileRowBytes);
    tiles_.template zero<kSums + Parity>();
    tiles_.template multiply_bytes<kSums + Parity, Parity, kWeights + Parity>();
    codes_at_ += Codes::kBytes;
    x_++;
    if (++group_ == groups_) {
      next_vector();
    }
  }

  // The last units are followed by the first ones, which are not used.
  __attribute__((always_inline)) void next_vector() {
    group_ = 0;
    if (++vector_ == vectors_) {
      vector_ = 0;
      block_ = block_ + 1 < blocks_ ? block_ + 1 : 0;
      codes_at_ = codes_.codes();
    }
    x_ = first_x_ + block_ * int64_t(all_groups_);
  }

  Tiles& tiles_;
  const IntegerProductArgs& args_;
  const Codes& codes_;
  int first_, all_groups_, groups_;  // of the chunk, of a row, of the chunk
  bool is_last_;                     // chunk
  int64_t memory_stride_;
  // The next unit to begin.
  const Block *x_ = nullptr, *first_x_ = nullptr;
  const uint8_t* codes_at_ = nullptr;
  int group_ = 0, vector_ = 0, block_ = 0, vectors_ = 0, blocks_ = 0;
  unsigned num_issued_ = 0, num_scaled_ = 0;
  alignas(64) int32_t ring_[kRing][Rows][kWidth];  // sums of units
};

// Multiplies rows [begin, end) by a panel of columns, `Rows` at a time.
template <int Bits, int Group, int Rows, int Vectors, typename Tiles>
inline void amx_digit_rows(
    const IntegerProductArgs& args, const CodeTiles<Bits, 1, Group, Vectors>& codes, int begin,
    int end, int first, int64_t column, int columns) {
  using Multiply = AmxDigitRows<Bits, Group, Rows, Vectors, Tiles>;
  TileShape shapes[kNumTiles];
  Multiply::configure(shapes);
  Tiles tiles(shapes);
  Multiply(tiles, args, codes, first).run(begin, end, column, columns);
}

}  // namespace mlx_paged::cpu::MLX_PAGED_ISA
