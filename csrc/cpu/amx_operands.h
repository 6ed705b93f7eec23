// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Operands of integer products with AMX tiles: blocks of rounded rows, and tiles of codes.

#pragma once

#include "amx_tiles.h"
#include "integers_tile_kernel.h"

namespace mlx_paged::cpu::MLX_PAGED_ISA {

// Rounded activations of kRowBlock rows and one group. See RowBlockLayout.
template <int Bits, int Digits, int Group>
struct RowBlock {
  static constexpr bool kInHalves = Bits == 4 && Digits == 3 && Group == 32;
  static constexpr int kPlanes = kInHalves ? 2 : Digits;
  static constexpr int kRowBytes = kInHalves ? 2 * Group : Group;
  static constexpr int kCodeBytes = kInHalves ? 2 : 1;
  static constexpr int kRowsPerTile = kTileRows / kPlanes;  // if it has all planes

  // Pieces one after another, as in IntegerChunk; halves follow bytes.
  int8_t digits[kRowBlock][kPlanes][kRowBytes];
  float scales[kRowBlock];
  float sums[kRowBlock];  // scale times the sum of the group's integers
};

// Splits integers into a low part of [-2056, 2039], which a signed byte and half byte can hold, and
// the rest. Returns the low part.
inline VecI take_low_12_bits(VecI& v) {
  const VecI low = ((v + 2056) & 4095) - 2056;
  v = (v - low) >> 12;
  return low;
}

// Stores the lowest eight bits of a group's integers.
template <int Bits, int Group>
inline void store_group(const VecI (&integers)[Group / kWidth], int8_t* to) {
  for (int i = 0; i < Group; i += 2 * kIntegerPiece) {
    store_digits(integers + i / kWidth, Bits, to + i, to + i + kIntegerPiece);
  }
}

template <int Bits, int Digits, int Group>
inline void store_planes(
    VecI (&integers)[Group / kWidth], RowBlock<Bits, Digits, Group>& to, int row) {
  using Block = RowBlock<Bits, Digits, Group>;
  constexpr int kVectors = Group / kWidth;
  for (int p = Block::kPlanes; p-- > 0;) {
    int8_t* at = to.digits[row][p];
    if constexpr (Block::kInHalves) {
      VecI upper[kVectors], lower[kVectors];
      for (int i = 0; i < kVectors; i++) {
        const VecI part = take_low_12_bits(integers[i]);
        lower[i] = ((part + 8) & 15) - 8;
        upper[i] = (part - lower[i]) >> 4;
      }
      store_group<Bits, Group>(upper, at);
      store_group<Bits, Group>(lower, at + Group);
    } else {
      store_group<Bits, Group>(integers, at);
      for (VecI& v : integers) {
        v = (v + 128) >> 8;
      }
    }
  }
}

// The order in which groups of k are multiplied and stored: within each chunk, every fourth group,
// four times, as each fourth has its own sum. A chunk of a few rows has four groups.
template <int Group>
struct GroupOrder {
  int groups;
  int chunk;

  GroupOrder(int k, int rows)
      : groups(k / Group), chunk(rows <= kRowBlock ? kIntegerGroups : kAmxChunk / Group) {}

  int in_chunk(int first) const { return groups - first < chunk ? groups - first : chunk; }

  // Index at which a group is stored.
  int64_t index_of(int group) const {
    const int first = group / chunk * chunk;
    const int size = in_chunk(first), quarter = group % kIntegerGroups;
    const int more = size % kIntegerGroups;
    return first + quarter * (size / kIntegerGroups) + (quarter < more ? quarter : more) +
           (group - first) / kIntegerGroups;
  }
};

// Rounds rows [begin, end) of one block of kRowBlock rows, group by group, as they are stored.
template <int Bits, int Digits, int Group>
inline void round_to_block(const RoundArgs& args, int begin, int end) {
  using Block = RowBlock<Bits, Digits, Group>;
  const int groups = args.k / Group;
  const GroupOrder<Group> order(args.k, args.rows);
  Block* to = static_cast<Block*>(args.out) + int64_t(begin / kRowBlock) * groups;
  Spread spreads[kRowBlock];
  for (int g = 0; g < groups; g++) {
    Block& block = to[order.index_of(g)];
    for (int row = begin; row < end; row++) {
      const int at = row % kRowBlock;
      VecI integers[Group / kWidth];
      float scale;
      const float* x = args.x + row * args.stride + g * Group;
      const int sum = round_group<Digits, Group>(x, args.bits, integers, scale, spreads[at]);
      store_planes(integers, block, at);
      block.scales[at] = scale;
      block.sums[at] = scale * float(sum);
    }
    // Padding rows of the last block are multiplied too, and arbitrary scales could be slow
    // denormals.
    for (int row = end; end == args.rows && row % kRowBlock != 0; row++) {
      block.scales[row % kRowBlock] = 0;
      block.sums[row % kRowBlock] = 0;
    }
  }
  for (int row = begin; row < end; row++) {
    if (spreads[row % kRowBlock].is_uneven()) {
      to[0].scales[row % kRowBlock] = bits_as_float(kUnevenRow);
    }
  }
}

template <int Bits, int Digits, int Group>
inline void round_to_blocks(const RoundArgs& args, int begin, int end) {
  for (int row = begin; row < end;) {
    const int next = (row / kRowBlock + 1) * kRowBlock;
    const int last = next < end ? next : end;
    round_to_block<Bits, Digits, Group>(args, row, last);
    row = last;
  }
}

// Rounds many rows for tiles, and few for integer_block. Bits: the fewest bits supported. Int8
// activations have the same blocks for weights of 4 and of 8 bits, but elements in another order.
template <int Bits, int Digits, int Group, int MinRows>
inline void round_for_amx(const RoundArgs& args, int begin, int end) {
  if (args.rows < MinRows) {
    return round_to_chunks<Digits, Group>(args, begin, end);
  }
  if (Bits == 4 && args.bits == 4) {
    return round_to_blocks<4, Digits, Group>(args, begin, end);
  }
  round_to_blocks<8, Digits, Group>(args, begin, end);
}

// Codes of a chunk of k and scales of 16 * Vectors columns, in the caller's memory.
template <int Bits, int Digits, int Group, int Vectors>
class CodeTiles {
 public:
  using Block = RowBlock<Bits, Digits, Group>;
  static constexpr int kUnits = Group / 4;
  static constexpr int kRows = Block::kRowBytes / 4;  // of a tile
  static constexpr int kBytes = kRows * kTileRowBytes;
  static constexpr int kPairs = Vectors * kWidth / kIntegerTileColumns;
  static constexpr bool kByVectors = Digits == 1;  // all groups of a vector follow each other

  CodeTiles(float* scratch, const WeightView& w, int rows)
      : w_(w),
        order_(w.k, rows),
        codes_(reinterpret_cast<uint8_t*>(scratch)),
        scales_(scratch + int64_t(order_.in_chunk(0)) * Vectors * kBytes / 4) {}

  const uint8_t* codes() const { return codes_; }

  // Scales and biases of 16 columns; the latter are kIntegerTileColumns further on.
  const float* scales(int group, int v) const {
    return scales_ + v / 2 * scales_per_pair() +
           int64_t(group >> group_shift<Group>(w_.group_size)) * 2 * kIntegerTileColumns +
           v % 2 * kWidth;
  }

  float* end() const { return scales_ + kPairs * scales_per_pair(); }

  void fill_scales(int64_t column, int columns) const {
    for (int pair = 0; pair < kPairs; pair++) {
      const int at = pair * kIntegerTileColumns;
      MLX_PAGED_ISA::fill_scales(w_, column + at, columns - at, scales_ + pair * scales_per_pair());
    }
  }

  // Unpacks the chunk that begins with group `first`.
  void fill(int first, int64_t column, int columns) const {
    const int groups = order_.in_chunk(first);
    const bool is_last = first + groups == order_.groups;
    constexpr int kGroupBytes = Group * Bits / 8;
    const int64_t bytes = int64_t(first) * kGroupBytes;
    const int64_t ahead =
        is_last ? int64_t(Vectors) * kWidth * w_.row_bytes - bytes : int64_t(groups) * kGroupBytes;
    int starts[kIntegerGroups];
    for (int i = 0; i < kIntegerGroups; i++) {
      starts[i] = int(order_.index_of(first + i) - first);
    }
    for (int v = 0; v < Vectors; v++) {
      ColumnBytes p;
      find_columns(w_.data, w_.row_bytes, column, columns, v, p);
      for (int g = 0; g < groups; g++) {
        const int64_t at = bytes + int64_t(g) * kGroupBytes;
        if (at % 64 == 0) {
          for (int j = 0; j < kWidth; j++) {
            __builtin_prefetch(p[j] + at + ahead, 0, 2);
          }
        }
        const int index = starts[g % kIntegerGroups] + g / kIntegerGroups;
        const int64_t tile =
            kByVectors ? int64_t(v) * groups + index : int64_t(index) * Vectors + v;
        unpack(p, first + g, codes_ + tile * kBytes);
      }
    }
  }

  // Unpacks a group of a vector of columns.
  __attribute__((always_inline)) static void unpack(const ColumnBytes& p, int group, uint8_t* to) {
    const int begin = group * Group;
    read_codes<Bits>(p, begin, begin + Group, [&](int unit, VecU8 codes) {
      uint8_t* of = to + (unit - begin / 4) * kTileRowBytes;
      if constexpr (Block::kInHalves) {
        _mm512_store_si512(of, _mm512_slli_epi16((__m512i)codes, 4));
        of += kBytes / 2;
      }
      _mm512_store_si512(of, (__m512i)codes);
    });
  }

  const WeightView& weights() const { return w_; }
  uint8_t* memory() const { return codes_; }
  int groups_in_memory() const { return order_.in_chunk(0); }

 private:
  int64_t scales_per_pair() const {
    return int64_t(w_.k / w_.group_size) * 2 * kIntegerTileColumns;
  }

  const WeightView& w_;
  GroupOrder<Group> order_;
  // [group, Vectors, kRows, kWidth, 4], or [Vectors, group, ...] if kByVectors, in GroupOrder; with
  // halves, 16 times the codes precede the codes.
  uint8_t* codes_;
  float* scales_;  // [pair of vectors, as in IntegerTile]
};

}  // namespace mlx_paged::cpu::MLX_PAGED_ISA
