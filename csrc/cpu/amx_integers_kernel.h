// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Implements integers.h with AMX tiles. A tile product computes the sums of one group for 16 rows
// and 16 columns; vectors scale them, in the order of integer_block, so a row has the same bits in
// either form.
//
// A tile product reads up to 64 bytes of each row, and a group has 32 activations. With 4-bit
// weights, three digits are therefore stored as two planes of 12 bits, each as a byte that meets
// 16 times the code and a half byte that meets the code itself: two products instead of three.

#pragma once

#include "amx_tiles.h"
#include "integers_tile_kernel.h"

namespace mlx_paged::cpu::MLX_PAGED_ISA {

// Rounded activations of kRowBlock rows and one group. See RowBlockLayout.
template <int Bits, int Digits>
struct RowBlock {
  static constexpr bool kInHalves = Bits == 4 && Digits == 3;
  static constexpr int kPlanes = kInHalves ? 2 : Digits;
  static constexpr int kRowBytes = kInHalves ? 2 * kIntegerGroup : kIntegerGroup;
  static constexpr int kCodeBytes = kInHalves ? 2 : 1;

  int8_t digits[kPlanes][kRowBlock][kRowBytes];
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

template <int Bits, int Digits>
inline void store_planes(
    VecI (&integers)[kIntegerGroup / kWidth], RowBlock<Bits, Digits>& to, int row) {
  using Block = RowBlock<Bits, Digits>;
  constexpr int kVectors = kIntegerGroup / kWidth;
  for (int p = Block::kPlanes; p-- > 0;) {
    int8_t* at = to.digits[p][row];
    VecI plane[kVectors];
    if constexpr (Block::kInHalves) {
      VecI upper[kVectors];
      for (int i = 0; i < kVectors; i++) {
        const VecI part = take_low_12_bits(integers[i]);
        plane[i] = ((part + 8) & 15) - 8;
        upper[i] = (part - plane[i]) >> 4;
      }
      store_digits(upper, Bits, at, at + kIntegerGroup / 2);
      at += kIntegerGroup;
    } else {
      for (int i = 0; i < kVectors; i++) {
        plane[i] = integers[i];
        integers[i] = (integers[i] + 128) >> 8;
      }
    }
    store_digits(plane, Bits, at, at + kIntegerGroup / 2);
  }
}

template <int Bits, int Digits>
inline void round_to_blocks(const RoundArgs& args, int begin, int end) {
  using Block = RowBlock<Bits, Digits>;
  const int groups = args.k / kIntegerGroup;
  auto block_of = [&](int row) {
    return static_cast<Block*>(args.out) + int64_t(row / kRowBlock) * groups;
  };
  for (int row = begin; row < end; row++) {
    const float* x = args.x + row * args.stride;
    Block* to = block_of(row);
    const int at = row % kRowBlock;
    Spread spread;
    for (int g = 0; g < groups; g++) {
      VecI integers[kIntegerGroup / kWidth];
      float scale;
      const int sum = round_group<Digits>(x + g * kIntegerGroup, integers, scale, spread);
      store_planes(integers, to[g], at);
      to[g].scales[at] = scale;
      to[g].sums[at] = scale * float(sum);
    }
    if (spread.is_uneven()) {
      to[0].scales[at] = bits_as_float(kUnevenRow);
    }
  }
  // Rows that only fill the last block are multiplied too, and must not take long.
  for (int row = end; end == args.rows && row % kRowBlock != 0; row++) {
    for (int g = 0; g < groups; g++) {
      block_of(row)[g].scales[row % kRowBlock] = 0;
      block_of(row)[g].sums[row % kRowBlock] = 0;
    }
  }
}

// Rounds many rows for tiles, and few for integer_block. Int8 activations have the same blocks for
// weights of 4 and of 8 bits, but elements in another order.
template <int Bits, int Digits, int MinRows>
inline void round_for_amx(const RoundArgs& args, int begin, int end) {
  if (args.rows < MinRows) {
    return round_to_chunks<Digits>(args, begin, end);
  }
  if (Bits == 4 && args.bits == 4) {
    return round_to_blocks<4, Digits>(args, begin, end);
  }
  round_to_blocks<8, Digits>(args, begin, end);
}

// Codes and scales of kIntegerTileColumns columns, in the caller's memory.
template <int Bits, int Digits>
struct CodeTiles {
  using Block = RowBlock<Bits, Digits>;
  static constexpr int kVectors = kIntegerTileColumns / kWidth;
  static constexpr int kRows = Block::kRowBytes / 4;  // of a tile
  static constexpr int kBytes = kRows * kTileRowBytes;

  uint8_t* codes;  // [group, vector, kRows, kWidth, 4]: 16 times the codes first, if in halves
  float* scales;   // as in IntegerTile

  CodeTiles(float* scratch, const WeightView& w)
      : codes(reinterpret_cast<uint8_t*>(scratch)),
        scales(
            scratch + int64_t(num_integer_chunks(w.k)) * kIntegerGroups * kVectors * kBytes / 4) {}

  uint8_t* at(int group, int v) const { return codes + (int64_t(group) * kVectors + v) * kBytes; }

  void fill(const WeightView& w, int64_t column, int columns) const {
    read_codes<Bits, true>(w, column, columns, [&](int group, int unit, int v, __m512i read) {
      uint8_t* to = at(group, v) + unit * kTileRowBytes;
      if constexpr (Block::kInHalves) {
        _mm512_store_si512(to, _mm512_slli_epi16(read, 4));
        to += kBytes / 2;
      }
      _mm512_store_si512(to, read);
    });
    fill_scales(w, column, columns, scales);
  }
};

// Multiplies `Rows` rows of a block by 16 columns.
template <int Bits, int Digits, int Rows, typename Tiles>
class AmxBlock {
 public:
  using Block = RowBlock<Bits, Digits>;
  using Codes = CodeTiles<Bits, Digits>;

  // Tiles: activations, then one of weights, then sums of even and of odd steps.
  static constexpr int kSums = kNumTiles - 2 * Block::kPlanes;
  static constexpr int kWeights = kSums - 1;

  AmxBlock(Tiles& tiles, const Block* x, const Codes& codes, const WeightView& w, int vector)
      : tiles_(tiles),
        x_(x),
        codes_(codes),
        groups_(w.k / kIntegerGroup),
        shift_(group_shift(w.group_size)),
        vector_(vector) {}

  void run(VecF (&out)[Rows]) {
    VecF sums[kIntegerGroups][Rows];
    for (int quarter = 0; quarter < kIntegerGroups; quarter++) {
      add_every_fourth(quarter, sums[quarter]);
    }
    for (int i = 0; i < Rows; i++) {
      out[i] = (sums[0][i] + sums[1][i]) + (sums[2][i] + sums[3][i]);
    }
  }

 private:
  typedef int32_t Products[Block::kPlanes][Rows][kWidth];

  // Sums of a group in the order of integer_block, where every fourth has its own sum. A tile
  // product takes 52 cycles until its sums can be stored, and a load whose address looks like that
  // of a waiting store waits too. So each step multiplies a group, stores the sums of the one
  // before, and scales those of the one before that.
  void add_every_fourth(int quarter, VecF (&out)[Rows]) {
    VecF sums[Rows] = {};
    const int steps = (groups_ - quarter + kIntegerGroups - 1) / kIntegerGroups;
    auto group = [&](int step) { return quarter + step * kIntegerGroups; };
    auto run_step = [&]<int Odd>(int step) {
      if (step + 2 < steps) {
        multiply<Odd>(group(step + 2));
      }
      if (step + 1 < steps) {
        store_sums<1 - Odd>();
      }
      scale(group(step), products_[Odd], sums);
    };
    if (steps > 0) {
      multiply<0>(group(0));
      store_sums<0>();
    }
    if (steps > 1) {
      multiply<1>(group(1));
    }
    for (int step = 0; step < steps; step += 2) {
      run_step.template operator()<0>(step);
      if (step + 1 < steps) {
        run_step.template operator()<1>(step + 1);
      }
    }
    for (int i = 0; i < Rows; i++) {
      out[i] = sums[i];
    }
  }

  template <int Odd>
  void multiply(int group) {
    tiles_.template load<kWeights>(codes_.at(group, vector_), kTileRowBytes);
    multiply_plane<0, Odd>(group);
    if constexpr (Block::kPlanes > 1) {
      multiply_plane<1, Odd>(group);
    }
    if constexpr (Block::kPlanes > 2) {
      multiply_plane<2, Odd>(group);
    }
  }

  template <int Odd, int Plane>
  static constexpr int kSumsOf = kSums + Odd * Block::kPlanes + Plane;

  template <int Plane, int Odd>
  void multiply_plane(int group) {
    constexpr int kX = (Odd * Block::kPlanes + Plane) % kWeights;
    tiles_.template zero<kSumsOf<Odd, Plane>>();
    tiles_.template load<kX>(x_[group].digits[Plane], Block::kRowBytes);
    tiles_.template multiply_bytes<kSumsOf<Odd, Plane>, kX, kWeights>();
  }

  template <int Odd>
  void store_sums() {
    Products& to = products_[Odd];
    tiles_.template store<kSumsOf<Odd, 0>>(to[0], kTileRowBytes);
    if constexpr (Block::kPlanes > 1) {
      tiles_.template store<kSumsOf<Odd, 1>>(to[1], kTileRowBytes);
    }
    if constexpr (Block::kPlanes > 2) {
      tiles_.template store<kSumsOf<Odd, 2>>(to[2], kTileRowBytes);
    }
  }

  void scale(int group, const Products& products, VecF (&sums)[Rows]) const {
    const float* w = codes_.scales + int64_t(group >> shift_) * 2 * kIntegerTileColumns;
    const VecF scale = load(w + vector_ * kWidth);
    const VecF bias = load(w + kIntegerTileColumns + vector_ * kWidth);
    const Block& x = x_[group];
    for (int i = 0; i < Rows; i++) {
      const VecF scaled = total(products, i) * x.scales[i];
      sums[i] += scaled * scale;
      sums[i] += x.sums[i] * bias;
    }
  }

  static VecF total(const Products& products, int i) {
    auto plane = [&](int p) { return load_as<VecI>(products[p][i]); };
    if constexpr (Block::kInHalves) {
      const VecI sums[1] = {(plane(0) << 12) + plane(1)};
      return whole_sum(sums);
    } else if constexpr (Digits == 3) {
      const VecI sums[2] = {(plane(0) << 8) + plane(1), plane(2)};
      return whole_sum(sums);
    } else {
      const VecI sums[1] = {plane(0)};
      return whole_sum(sums);
    }
  }

  Tiles& tiles_;
  const Block* x_;
  const Codes& codes_;
  int groups_, shift_, vector_;
  alignas(64) Products products_[2];
};

// Computes rows of one tile shape. `Rows`: of a tile; the last tile may have fewer.
template <int Bits, int Digits, int Rows, typename Tiles>
inline void amx_rows(
    const IntegerProductArgs& args, const CodeTiles<Bits, Digits>& codes, int begin, int end,
    int64_t column, int columns) {
  using Block = RowBlock<Bits, Digits>;
  constexpr TileShape kX{Rows, Block::kRowBytes}, kSums{Rows, kTileRowBytes};
  constexpr TileShape kCodes{Block::kRowBytes / 4, kTileRowBytes};
  using Multiply = AmxBlock<Bits, Digits, Rows, Tiles>;
  TileShape shapes[kNumTiles];
  for (int tile = 0; tile < kNumTiles; tile++) {
    shapes[tile] = tile < Multiply::kWeights ? kX : tile == Multiply::kWeights ? kCodes : kSums;
  }
  Tiles tiles(shapes);
  const int groups = args.weights.k / kIntegerGroup;
  for (int row = begin; row < end; row += Rows) {
    auto x = static_cast<const Block*>(args.x) + int64_t(row / kRowBlock) * groups;
    for (int v = 0; v * kWidth < columns; v++) {
      VecF sums[Rows];
      Multiply(tiles, x, codes, args.weights, v).run(sums);
      const int bytes = (columns - v * kWidth < kWidth ? columns - v * kWidth : kWidth) * 4;
      for (int i = 0; i < Rows && row + i < end; i++) {
        float* to = args.c + int64_t(row + i) * args.ldc + column + v * kWidth;
        __builtin_memcpy(to, &sums[i], bytes);
      }
    }
  }
}

template <int Bits, int Digits, typename Tiles>
inline void amx_product_of(const IntegerProductArgs& args, int64_t begin, int64_t end) {
  const CodeTiles<Bits, Digits> codes(args.scratch, args.weights);
  const int whole = args.rows / kRowBlock * kRowBlock;
  const int rest = args.rows - whole;
  for (int64_t column = begin; column < end; column += kIntegerTileColumns) {
    int columns = end - column < kIntegerTileColumns ? int(end - column) : kIntegerTileColumns;
    codes.fill(args.weights, column, columns);
    // A product takes as long as its tile has rows.
    if (whole > 0) {
      amx_rows<Bits, Digits, 16, Tiles>(args, codes, 0, whole, column, columns);
    }
    if (rest > 8) {
      amx_rows<Bits, Digits, 16, Tiles>(args, codes, whole, args.rows, column, columns);
    } else if (rest > 4) {
      amx_rows<Bits, Digits, 8, Tiles>(args, codes, whole, args.rows, column, columns);
    } else if (rest > 0) {
      amx_rows<Bits, Digits, 4, Tiles>(args, codes, whole, args.rows, column, columns);
    }
  }
}

// Least rows for tiles of AMX, to which eight and twelve rows cost as much as sixteen.
constexpr int kMinAmxRows = 16;

template <int Bits, int Digits, typename Tiles>
inline void amx_product(const IntegerProductArgs& args, int64_t begin, int64_t end) {
  const bool tiles = args.rows >= kMinAmxRows;
  if (Bits == 4 && args.weights.bits == 4) {
    return tiles ? amx_product_of<4, Digits, Tiles>(args, begin, end)
                 : integer_product_of<4, Digits>(args, begin, end);
  }
  tiles ? amx_product_of<8, Digits, Tiles>(args, begin, end)
        : integer_product_of<8, Digits>(args, begin, end);
}

// Bits: the least that are served.
template <int Bits, int Digits, typename Tiles>
constexpr IntegerKernels kAmxKernelsOf = {
    sizeof(IntegerChunk<Digits>),
    Digits,
    round_for_amx<Bits, Digits, kMinAmxRows>,
    amx_product<Bits, Digits, Tiles>,
    kMinTileRows,
    RowBlock<Bits, Digits>::kCodeBytes,
    {int(sizeof(RowBlock<Bits, Digits>::digits)), kMinAmxRows}};

}  // namespace mlx_paged::cpu::MLX_PAGED_ISA
