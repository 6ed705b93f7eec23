// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Implements integers.h with AMX tiles. A tile product computes the sums of one group for 16 rows
// and 16 columns; vectors scale them, in the order of integer_block, so a row has the same bits in
// either form.
//
// A tile product reads up to 64 bytes of each row. In groups of 32 with 4-bit weights, three digits
// are therefore stored as two planes of 12 bits, each as a byte that meets 16 times the code and a
// half byte that meets the code itself: two products instead of three.
//
// Every tile instruction takes 8 to 16 cycles, including loads and stores, however few rows a tile
// has. So a group's activations stay in tiles for all columns of a panel, sums wait in the L1
// cache, and a tile has all digits of a few rows. Up to kRowBlock rows are multiplied by codes that
// are unpacked to the L1 cache just before. More rows are multiplied in chunks of kAmxChunk
// elements of k, whose codes and activations fit in the L2 cache.

#pragma once

#include "amx_digit_kernel.h"
#include "amx_operands.h"

namespace mlx_paged::cpu::MLX_PAGED_ISA {

// Unpacks groups of a panel's columns, in order, to a ring buffer that stays in the L1 cache.
template <int Bits, int Digits, int Group, int Vectors>
class RingOfTiles {
 public:
  using Codes = CodeTiles<Bits, Digits, Group, Vectors>;

  RingOfTiles(const Codes& codes, int64_t column, int columns)
      : codes_(codes),
        groups_(codes.weights().k / Group),
        ring_(codes.groups_in_memory()),
        next_panel_(codes.weights().from_row(column + kColumns)) {
    const WeightView& w = codes.weights();
    const int64_t scale_bytes = w.dtype == DType::float32 ? 4 : 2;
    scale_share_ = (kColumns * (w.k / w.group_size) * scale_bytes + groups_ - 1) / groups_;
    for (int v = 0; v < Vectors; v++) {
      find_columns(w.data, w.row_bytes, column, columns, v, columns_[v]);
    }
    for (int group = 0; group < kAhead && group < groups_; group++) {
      unpack_group<0>(group);
    }
  }

  // Unpacks vector V of the group kAhead groups after `group`.
  template <int V>
  __attribute__((always_inline)) void unpack_after(int group) const {
    if (group + kAhead < groups_) {
      unpack<V>(group + kAhead);
    }
  }

 private:
  static constexpr int kAhead = 2;
  static constexpr int kPrefetchAhead = 256;  // bytes of each column
  static constexpr int kColumns = Vectors * kWidth;

  template <int V>
  void unpack_group(int group) const {
    unpack<V>(group);
    if constexpr (V + 1 < Vectors) {
      unpack_group<V + 1>(group);
    }
  }

  template <int V>
  __attribute__((always_inline)) void unpack(int group) const {
    prefetch<V>(group);
    const int64_t tile = int64_t(group % ring_) * Vectors + V;
    Codes::unpack(columns_[V], group, codes_.memory() + tile * Codes::kBytes);
  }

  // Prefetches later codes of these columns, or the first of the next panel, and a share of its
  // scales.
  template <int V>
  __attribute__((always_inline)) void prefetch(int group) const {
    constexpr int kGroupBytes = Group * Bits / 8;
    constexpr int kAtOnce = kWidth * kGroupBytes / 64;  // columns
    const int64_t row_bytes = next_panel_.row_bytes;
    int64_t at = int64_t(group) * kGroupBytes / 64 * 64 + kPrefetchAhead;
    at += at < row_bytes ? 0 : (kColumns - 1) * row_bytes;
    const int first = group * kAtOnce % kWidth;
    for (int j = first; j < first + kAtOnce; j++) {
      __builtin_prefetch(columns_[V][j] + at, 0, 2);
    }
    for (int64_t i = 0; V == 0 && i < scale_share_; i += 64) {
      const int64_t share = group * scale_share_;
      __builtin_prefetch(static_cast<const char*>(next_panel_.scales) + share + i, 0, 2);
      __builtin_prefetch(static_cast<const char*>(next_panel_.biases) + share + i, 0, 2);
    }
  }

  const Codes& codes_;
  int groups_, ring_;
  int64_t scale_share_;
  WeightView next_panel_;
  ColumnBytes columns_[Vectors];
};

// Stands for RingOfTiles where all codes are unpacked.
struct UnpackedTiles {
  template <int V>
  void unpack_after(int) const {}
};

// Multiplies `Rows` rows of a block by the columns of a panel. A unit of work is the products of
// one group and 16 columns. Sums can be stored some 52 cycles after a product began and loaded when
// they are in the cache, so a unit's sums are stored kSets units later, and scaled after that.
//
// InOrder: groups have their natural order, and codes are in a RingOfTiles.
template <
    int Bits, int Digits, int Group, int Rows, int Vectors, typename Tiles, bool InOrder = false>
class AmxBlock {
 public:
  using Block = RowBlock<Bits, Digits, Group>;
  using Codes = CodeTiles<Bits, Digits, Group, Vectors>;
  typedef VecF Sums[kIntegerGroups][Vectors][Rows];

  AmxBlock(Tiles& tiles, const Codes& codes) : tiles_(tiles), codes_(codes) {}

  // Activations take as few tiles as possible: one or two with all planes of their rows, or one for
  // each plane.
  static constexpr int kPlanes = Block::kPlanes;
  static constexpr bool kHasAllPlanes = Rows <= 2 * Block::kRowsPerTile;
  static constexpr int kInputs = !kHasAllPlanes ? kPlanes : Rows <= Block::kRowsPerTile ? 1 : 2;
  static constexpr int kRowsOfTile = kHasAllPlanes ? Rows / kInputs * kPlanes : Rows;

  // Tiles: activations, two of weights, and sums.
  static constexpr int kWeights = kInputs;
  static constexpr int kFirstSums = kWeights + 2;
  static constexpr int kSets = kFirstSums + 2 * kInputs <= kNumTiles ? 2 : 1;

  static void configure(TileShape (&shapes)[kNumTiles]) {
    for (int tile = 0; tile < kNumTiles; tile++) {
      shapes[tile] = tile < kWeights     ? TileShape{kRowsOfTile, Block::kRowBytes}
                     : tile < kFirstSums ? TileShape{Codes::kRows, kTileRowBytes}
                                         : TileShape{kRowsOfTile, kTileRowBytes};
    }
  }

  // Adds the products of a chunk of `groups` groups, which begins with group `first`, to `sums`.
  // x: the block's groups of that chunk. Each group gives `unpacking` time for a later one.
  template <typename Unpacking>
  void run(const Block* x, int first, int groups, Sums& sums, const Unpacking& unpacking) {
    first_ = group_ = first;
    last_ = first + groups;
    scaled_ = x;
    sums_ = &sums;
    codes_at_ = codes_.codes();
    codes_end_ = codes_at_ + int64_t(codes_.groups_in_memory()) * Vectors * Codes::kBytes;
    load_x<0>(*x);
    load_weights<0>();
    load_weights<1>();
    for (int i = 0; i < groups; i++) {
      const Block& next = i + 1 < groups ? x[i + 1] : x[i];
      for_each_vector([&]<int V>() __attribute__((always_inline)) {
        multiply<V>(next);
        if (V >= kLag || i * Vectors + V >= kLag) {
          scale<V - kLag>();
        }
        unpacking.template unpack_after<V>(i);
      });
    }
    const int units = groups * Vectors;
    for (int i = 0; i < kSets; i++) {
      i == 0 ? store_all<0>() : store_all<1>();
      if (units + i >= kLag) {
        i == 0 ? scale<-kLag>() : scale<1 - kLag>();
      }
    }
    scale<kSets - kLag>();
  }

 private:
  static constexpr int kLag = kSets + 1;

  typedef int32_t Products[kInputs][kRowsOfTile][kWidth];

  template <typename Body>
  __attribute__((always_inline)) static void for_each_vector(const Body& body) {
    body.template operator()<0>();
    body.template operator()<1>();
    if constexpr (Vectors == 4) {
      body.template operator()<2>();
      body.template operator()<3>();
    }
  }

  // Units alternate between two buffers.
  static constexpr int parity(int unit) { return unit & 1; }

  template <int V, int Input>
  static constexpr int kSumsOf = kFirstSums + (V + 2) % kSets * kInputs + Input;

  template <int Input>
  __attribute__((always_inline)) void load_input(const Block& x) {
    if constexpr (kHasAllPlanes) {
      tiles_.template load<Input>(x.digits[Input * (Rows / kInputs)], Block::kRowBytes);
    } else {
      tiles_.template load<Input>(x.digits[0][Input], kPlanes * Block::kRowBytes);
    }
  }

  template <int Input>
  void load_x(const Block& x) {
    load_input<Input>(x);
    if constexpr (Input + 1 < kInputs) {
      load_x<Input + 1>(x);
    }
  }

  template <int V>
  void load_weights() {
    tiles_.template load<kWeights + parity(V)>(codes_at_, kTileRowBytes);
    codes_at_ += Codes::kBytes;
    if (InOrder && codes_at_ == codes_end_) {
      codes_at_ = codes_.codes();
    }
  }

  // Begins a unit. The last two load weights past the end, which are not used.
  template <int V>
  __attribute__((always_inline)) void multiply(const Block& next) {
    multiply_input<V, 0>(next);
    if constexpr (kInputs > 1) {
      multiply_input<V, 1>(next);
    }
    if constexpr (kInputs > 2) {
      multiply_input<V, 2>(next);
    }
    load_weights<V>();
  }

  template <int V, int Input>
  __attribute__((always_inline)) void multiply_input(const Block& next) {
    constexpr int kC = kSumsOf<V, Input>;
    store_sums_of<V, Input>();
    tiles_.template zero<kC>();
    tiles_.template multiply_bytes<kC, Input, kWeights + parity(V)>();
    if constexpr (V == Vectors - 1) {
      load_input<Input>(next);
    }
  }

  // Stores the sums of the unit whose tiles unit V uses next.
  template <int V, int Input>
  void store_sums_of() {
    tiles_.template store<kSumsOf<V, Input>>(products_[parity(V - kSets)][Input], kTileRowBytes);
  }

  template <int V>
  void store_all() {
    store_sums_of<V, 0>();
    if constexpr (kInputs > 1) {
      store_sums_of<V, 1>();
    }
    if constexpr (kInputs > 2) {
      store_sums_of<V, 2>();
    }
  }

  // Scales the next unit, whose vector is V.
  template <int V>
  __attribute__((always_inline)) void scale() {
    constexpr int kV = (V + 2 * Vectors) % Vectors;
    const Products& products = products_[parity(kV)];
    const float* scales = codes_.scales(group_, kV);
    const VecF scale = load(scales);
    const VecF bias = load(scales + kIntegerTileColumns);
    const Block& x = *scaled_;
    VecF(&sums)[Rows] = (*sums_)[group_ % kIntegerGroups][kV];
    // The first groups find other numbers there. Zeroing the sums before took a tenth of the time.
    const __mmask16 has_sums = group_ < kIntegerGroups ? 0 : 0xffff;
#pragma GCC unroll 16
    for (int i = 0; i < Rows; i++) {
      const VecF scaled = total(products, i) * x.scales[i];
      VecF sum = (VecF)_mm512_maskz_load_ps(has_sums, &sums[i]);
      sum += scaled * scale;
      sum += x.sums[i] * bias;
      sums[i] = sum;
    }
    if constexpr (kV == Vectors - 1) {
      scaled_++;
      group_ += InOrder ? 1 : kIntegerGroups;
      if (!InOrder && group_ >= last_) {
        group_ = first_ + group_ % kIntegerGroups + 1;
      }
    }
  }

  __attribute__((always_inline)) static VecF total(const Products& products, int i) {
    auto plane = [&](int p) {
      if constexpr (kHasAllPlanes) {
        constexpr int kEach = Rows / kInputs;
        return load_as<VecI>(products[i / kEach][i % kEach * kPlanes + p]);
      } else {
        return load_as<VecI>(products[p][i]);
      }
    };
    if constexpr (Block::kInHalves) {
      const VecI sums[1] = {(plane(0) << 12) + plane(1)};
      return whole_sum(sums);
    } else if constexpr (kIntegerSums<Bits, Digits> == 2) {
      const VecI sums[2] = {(plane(0) << 8) + plane(1), plane(2)};
      return whole_sum(sums);
    } else if constexpr (Digits == 3) {
      const VecI sums[1] = {(((plane(0) << 8) + plane(1)) << 8) + plane(2)};
      return whole_sum(sums);
    } else {
      const VecI sums[1] = {plane(0)};
      return whole_sum(sums);
    }
  }

  Tiles& tiles_;
  const Codes& codes_;
  const uint8_t* codes_at_ = nullptr;  // the next to be loaded
  const uint8_t* codes_end_ = nullptr;
  int first_ = 0, last_ = 0;       // groups
  int group_ = 0;                  // the next to be scaled
  const Block* scaled_ = nullptr;  // its activations
  Sums* sums_ = nullptr;
  alignas(64) Products products_[2];  // of even and odd units
};

// Stores the results of `rows` rows.
template <int Vectors, int Rows>
inline void store_rows(
    const IntegerProductArgs& args, const VecF (&sums)[kIntegerGroups][Vectors][Rows], int row,
    int rows, int64_t column, int columns) {
  for (int v = 0; v * kWidth < columns; v++) {
    const int left = columns - v * kWidth;
    const __mmask16 mask = left < kWidth ? (1u << left) - 1 : 0xffff;
    float* to = args.c + row * args.ldc + column + v * kWidth;
    for (int i = 0; i < rows; i++, to += args.ldc) {
      const VecF sum = (sums[0][v][i] + sums[1][v][i]) + (sums[2][v][i] + sums[3][v][i]);
      _mm512_mask_storeu_ps(to, mask, (__m512)sum);
    }
  }
}

// Multiplies rows [begin, end), `Rows` at a time, by a panel of columns. The last tile of rows may
// be incomplete.
template <int Bits, int Digits, int Group, int Rows, int Vectors, typename Tiles>
inline void amx_rows(
    const IntegerProductArgs& args, const CodeTiles<Bits, Digits, Group, Vectors>& codes, int begin,
    int end, int first, int64_t column, int columns) {
  using Multiply = AmxBlock<Bits, Digits, Group, Rows, Vectors, Tiles>;
  using Block = RowBlock<Bits, Digits, Group>;
  static_assert(!CodeTiles<Bits, Digits, Group, Vectors>::kByVectors);
  using Sums = typename Multiply::Sums;
  TileShape shapes[kNumTiles];
  Multiply::configure(shapes);
  Tiles tiles(shapes);
  Multiply multiply(tiles, codes);
  const GroupOrder<Group> order(args.weights.k, args.rows);
  const bool has_chunks = order.in_chunk(0) < order.groups;
  const int in_chunk = order.in_chunk(first);
  for (int row = begin; row < end; row += Rows) {
    const int block = row / kRowBlock;
    // With several chunks, each block's sums need memory between them.
    float* memory = codes.end() + (has_chunks ? block : 0) * kPanelSums;
    auto& sums = *reinterpret_cast<Sums*>(memory);
    if (order.groups < kIntegerGroups) {
      __builtin_memset(&sums, 0, sizeof(sums));  // Some of them get no group.
    }
    auto x = static_cast<const Block*>(args.x) + int64_t(block) * order.groups + first;
    multiply.run(x, first, in_chunk, sums, UnpackedTiles());
    if (first + in_chunk == order.groups) {
      store_rows(args, sums, row, end - row < Rows ? end - row : Rows, column, columns);
    }
  }
}

// Multiplies all of up to `Rows` rows by a panel.
template <int Bits, int Digits, int Group, int Rows, int Vectors, typename Tiles>
inline void amx_few_rows(
    const IntegerProductArgs& args, const CodeTiles<Bits, Digits, Group, Vectors>& codes,
    int64_t column, int columns) {
  using Multiply = AmxBlock<Bits, Digits, Group, Rows, Vectors, Tiles, true>;
  using Block = RowBlock<Bits, Digits, Group>;
  TileShape shapes[kNumTiles];
  Multiply::configure(shapes);
  Tiles tiles(shapes);
  Multiply multiply(tiles, codes);
  auto& sums = *reinterpret_cast<typename Multiply::Sums*>(codes.end());
  const int groups = args.weights.k / Group;
  if (groups < kIntegerGroups) {
    __builtin_memset(&sums, 0, sizeof(sums));  // Some of them get no group.
  }
  const RingOfTiles<Bits, Digits, Group, Vectors> ring(codes, column, columns);
  multiply.run(static_cast<const Block*>(args.x), 0, groups, sums, ring);
  store_rows(args, sums, 0, args.rows, column, columns);
}

// Minimum rows for AMX tiles, by the fewest bits of the weights. With fewer, vectors need less time
// than unpacking.
template <int Bits, int Digits>
constexpr int kMinAmxRows = Digits == 1 ? 12
                            : Bits == 4 ? 4
                                        : 5;

// Computes up to 16 * Vectors columns.
template <int Bits, int Digits, int Group, int Vectors, typename Tiles>
inline void amx_panel(const IntegerProductArgs& args, int64_t column, int columns) {
  const CodeTiles<Bits, Digits, Group, Vectors> codes(args.scratch, args.weights, args.rows);
  const int whole = args.rows / kRowBlock * kRowBlock;
  const int rest = args.rows - whole;
  codes.fill_scales(column, columns);
  if constexpr (kMinAmxRows<Bits, Digits> <= 8) {
    if (args.rows <= 4) {
      return amx_few_rows<Bits, Digits, Group, 4, Vectors, Tiles>(args, codes, column, columns);
    }
    if (args.rows <= 8) {
      return amx_few_rows<Bits, Digits, Group, 8, Vectors, Tiles>(args, codes, column, columns);
    }
  }
  if (args.rows <= kRowBlock) {
    return amx_few_rows<Bits, Digits, Group, 16, Vectors, Tiles>(args, codes, column, columns);
  }
  const GroupOrder<Group> order(args.weights.k, args.rows);
  for (int first = 0; first < order.groups; first += order.chunk) {
    codes.fill(first, column, columns);
    auto rows = [&]<int Rows>(int begin, int end) {
      if constexpr (Digits == 1) {
        amx_digit_rows<Bits, Group, Rows, Vectors, Tiles>(
            args, codes, begin, end, first, column, columns);
      } else {
        amx_rows<Bits, Digits, Group, Rows, Vectors, Tiles>(
            args, codes, begin, end, first, column, columns);
      }
    };
    if (whole > 0) {
      rows.template operator()<16>(0, whole);
    }
    if (rest > 8) {
      rows.template operator()<16>(whole, args.rows);
    } else if (rest > 4) {
      rows.template operator()<8>(whole, args.rows);
    } else if (rest > 0) {
      rows.template operator()<4>(whole, args.rows);
    }
  }
}

template <int Bits, int Digits, int Group, typename Tiles>
inline void amx_product_of(const IntegerProductArgs& args, int64_t begin, int64_t end) {
  for (int64_t column = begin; column < end; column += kPanelColumns) {
    const int columns = end - column < kPanelColumns ? int(end - column) : kPanelColumns;
    columns <= kIntegerTileColumns
        ? amx_panel<Bits, Digits, Group, 2, Tiles>(args, column, columns)
        : amx_panel<Bits, Digits, Group, 4, Tiles>(args, column, columns);
  }
}

template <int Bits, int Digits, int Group, int MinRows, typename Tiles>
inline void amx_product_of_bits(const IntegerProductArgs& args, int64_t begin, int64_t end) {
  args.rows < MinRows ? integer_columns<Bits, Digits, Group>(args, begin, end)
                      : amx_product_of<Bits, Digits, Group, Tiles>(args, begin, end);
}

template <int Bits, int Digits, int Group, typename Tiles>
inline void amx_product(const IntegerProductArgs& args, int64_t begin, int64_t end) {
  constexpr int kMinRows = kMinAmxRows<Bits, Digits>;
  if (Bits == 4 && args.weights.bits == 4) {
    return amx_product_of_bits<4, Digits, Group, kMinRows, Tiles>(args, begin, end);
  }
  amx_product_of_bits<8, Digits, Group, kMinRows, Tiles>(args, begin, end);
}

// Bits: the fewest bits supported.
template <int Bits, int Digits, int Group, typename Tiles>
constexpr IntegerKernels kAmxKernelsOf = {
    sizeof(IntegerChunk<Digits, Group>),
    Digits,
    Group,
    round_for_amx<Bits, Digits, Group, kMinAmxRows<Bits, Digits>>,
    amx_product<Bits, Digits, Group, Tiles>,
    kMinAmxRows<Bits, Digits>,
    {Group, int(sizeof(RowBlock<Bits, Digits, Group>::digits)), kMinAmxRows<Bits, Digits>,
     RowBlock<Bits, Digits, Group>::kCodeBytes}};

}  // namespace mlx_paged::cpu::MLX_PAGED_ISA
