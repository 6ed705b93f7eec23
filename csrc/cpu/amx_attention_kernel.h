// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Attention of bfloat16 pools with AMX tiles. A tile product adds in an order of its own, so decode
// uses it too: a row has the same bits in any step. Queries, keys and values enter the products as
// they are, and probabilities as two bfloat16 parts, which keep 16 bits. Scores, softmax and sums
// are float32. Denormals count as zero.

#pragma once

#include "amx_bfloat_kernel.h"
#include "attention_kernel.h"
#include "softmax.h"
#include "tiles.h"

namespace mlx_paged::cpu::MLX_PAGED_ISA {

constexpr int kWeightParts = 2;
constexpr int kTokenBlocks = kTile / kBFloatBlock;  // also pieces of kBFloatTileColumns tokens
static_assert(kBFloatBlock == kBFloatTileColumns && kTile % kBFloatBlock == 0);

typedef BFloatRows<1> QueryRows;              // of kTileRows lanes and one block of dims
typedef BFloatRows<kWeightParts> WeightRows;  // of kTileRows lanes and one block of tokens

// Offsets of the tiles' operands too: packed keys, later values; then probabilities.
struct TileLayout : Layout {
  int lane_tiles, key_blocks, value_pieces;
  size_t weights;

  TileLayout(const AttentionArgs& args, int rows) : Layout(args, rows) {
    lane_tiles = round_up(lanes, kTileRows) / kTileRows;
    key_blocks = round_up(args.keys.head_dim, kBFloatBlock) / kBFloatBlock;
    value_pieces = round_up(args.values.head_dim, kBFloatTileColumns) / kBFloatTileColumns;
    weights = size_t(kTile) * kBFloatBlock / 2 * max(key_blocks, value_pieces);
    shared_end = weights + lane_tiles * kTokenBlocks * sizeof(WeightRows) / sizeof(float);
    place_state(lane_tiles * key_blocks * sizeof(QueryRows) / sizeof(float));
  }
};

inline size_t tile_scratch_size(const AttentionArgs& args, int rows, int num_heads) {
  TileLayout at(args, rows);
  return at.shared_end + num_heads * at.per_head;
}

// Elements [first, first + kBFloatBlock) of a row of `dim`, with zeros past its end.
inline __m512i load_block(const BFloat* row, int first, int dim) {
  const int left = dim - first;
  const __mmask32 mask = left >= kBFloatBlock ? ~0u : (1u << left) - 1;
  return _mm512_maskz_loadu_epi16(mask, row + first);
}

// Fills the queries of all lane tiles; lanes that do not exist are zero.
inline void load_tile_queries(
    const AttentionArgs& args, const Item& item, int kv_head, const TileLayout& at,
    QueryRows* out) {
  const int group = args.num_q_heads / args.num_kv_heads;
  const int dim = args.keys.head_dim;
  __builtin_memset(out, 0, at.lane_tiles * at.key_blocks * sizeof(QueryRows));
  for (int lane = 0; lane < at.lanes; lane++) {
    const int64_t row = item.row_begin + lane / group;
    const BFloat* q = static_cast<const BFloat*>(args.queries) +
                      (row * args.num_q_heads + kv_head * group + lane % group) * dim;
    QueryRows* to = out + lane / kTileRows * at.key_blocks;
    for (int block = 0; block < at.key_blocks; block++) {
      _mm512_storeu_si512(
          to[block].values[0][lane % kTileRows], load_block(q, block * kBFloatBlock, dim));
    }
  }
}

// A pool's rows for a tile of tokens. Rows of the tile without a token are zeros.
template <typename T>
class TokenRows {
 public:
  TokenRows(const AttentionArgs& args, const PoolView& pool, const Item& item, int token, int count)
      : first_(token % kTile), end_(first_ + count), head_dim_(pool.head_dim) {
    token_rows(args, pool, item.block_table, token, count, rows_ + first_);
  }

  // `i`: the token's index in the tile.
  const T* row(int i, int head) const {
    static const T zeros[kMaxHeadDim] = {};
    return i >= first_ && i < end_ ? rows_[i] + head * head_dim_ : zeros;
  }

  // Prefetches rows [begin, end) of a head while others are packed.
  void prefetch(int begin, int end, int head) const {
    const int64_t bytes = head_dim_ * sizeof(T);
    auto rows = reinterpret_cast<const char* const*>(rows_);
    fetch(rows, max(begin, first_), min(end, end_), head * bytes, bytes);
  }

 private:
  const T* rows_[kTile];  // [first_, end_): of all KV heads
  int first_, end_, head_dim_;
};

// Calls body(tile, RowTiles) for lane tiles: two at a time, then the last.
template <typename Body>
inline void for_lane_tiles(int count, const Body& body) {
  int tile = 0;
  for (; tile + 2 <= count; tile += 2) {
    body(tile, Lanes<2>());
  }
  if (tile < count) {
    body(tile, Lanes<1>());
  }
}

// Computes the scores of a tile of tokens.
template <typename Tiles>
inline void score_tile(
    const AttentionArgs& args, const TileLayout& at, Tiles& tiles, int head,
    const TokenRows<BFloat>& keys, const TokenRows<BFloat>& values, const State& state,
    __m512i* packed) {
  auto queries = reinterpret_cast<const QueryRows*>(state.queries);
  for (int piece = 0; piece < kTile; piece += kBFloatTileColumns) {
    values.prefetch(piece, piece + kBFloatTileColumns, head);
    auto key_at = [&](int i) { return keys.row(piece + i, head); };
    fill_pairs(key_at, args.keys.head_dim, packed);
    for_lane_tiles(at.lane_tiles, [&](int tile, auto count) {
      constexpr int kTiles = decltype(count)::kCount;
      alignas(64) float sums[kTiles][kTileVectors][kTileRows][kWidth];
      multiply_bfloat_tiles<1, kTiles>(
          tiles, queries + tile * at.key_blocks, at.key_blocks, packed, sums);
      const int first = tile * kTileRows;
      for (int i = 0; i < kTiles * kTileRows && first + i < at.lanes; i++) {
        float* scores = state.scores + (first + i) * kTile + piece;
        for (int v = 0; v < kTileVectors; v++) {
          store(
              scores + v * kWidth,
              load(sums[i / kTileRows][v][i % kTileRows]) * args.options.scale);
        }
      }
    });
  }
}

// Splits the probabilities of all lanes.
inline void split_weights(const TileLayout& at, const State& state, WeightRows* out) {
  for (int lane = 0; lane < at.lanes; lane++) {
    WeightRows* to = out + lane / kTileRows * kTokenBlocks;
    for (int t = 0; t < kTile; t += kWidth) {
      const VecF weights = load(state.scores + lane * kTile + t);
      const auto high = (__m256i)_mm512_cvtneps_pbh((__m512)weights);
      const auto low = (__m256i)_mm512_cvtneps_pbh((__m512)(weights - widened(high, BFloat{})));
      auto& rows = to[t / kBFloatBlock].values;
      __builtin_memcpy(rows[0][lane % kTileRows] + t % kBFloatBlock, &low, sizeof(low));
      __builtin_memcpy(rows[1][lane % kTileRows] + t % kBFloatBlock, &high, sizeof(high));
    }
  }
}

// Packs kBFloatTileColumns dims of a tile of values from `first` on as [pair of tokens, vector,
// kWidth, 2].
inline void pack_values(
    const TokenRows<BFloat>& values, int head, int first, int dim, __m512i* out) {
  constexpr int kSecond = kBFloatBlock;  // in the indices of a permutation: of the second operand
  alignas(64) uint16_t order[kTileVectors][2 * kWidth];
  for (int i = 0; i < kTileVectors * kWidth; i++) {
    order[i / kWidth][2 * (i % kWidth)] = uint16_t(i);
    order[i / kWidth][2 * (i % kWidth) + 1] = uint16_t(kSecond + i);
  }
  for (int pair = 0; pair < kTile / 2; pair++) {
    const __m512i even = load_block(values.row(2 * pair, head), first, dim);
    const __m512i odd = load_block(values.row(2 * pair + 1, head), first, dim);
    for (int v = 0; v < kTileVectors; v++) {
      const __m512i indices = _mm512_load_si512(order[v]);
      out[pair * kTileVectors + v] = _mm512_permutex2var_epi16(even, indices, odd);
    }
  }
}

// Adds a tile's weighted values to the lanes' sums.
template <typename Tiles>
inline void mix_tile(
    const AttentionArgs& args, const TileLayout& at, Tiles& tiles, int head,
    const TokenRows<BFloat>& values, const TokenRows<BFloat>& next_keys, const State& state,
    WeightRows* weights, __m512i* packed) {
  split_weights(at, state, weights);
  const int fetched = round_up(kTile, at.value_pieces) / at.value_pieces;
  for (int piece = 0; piece < at.value_pieces; piece++) {
    next_keys.prefetch(piece * fetched, (piece + 1) * fetched, head);
    const int column = piece * kBFloatTileColumns;
    pack_values(values, head, column, args.values.head_dim, packed);
    for_lane_tiles(at.lane_tiles, [&](int tile, auto count) {
      constexpr int kTiles = decltype(count)::kCount;
      alignas(64) float sums[kTiles][kTileVectors][kTileRows][kWidth];
      multiply_bfloat_tiles<kWeightParts, kTiles>(
          tiles, weights + tile * kTokenBlocks, kTokenBlocks, packed, sums);
      const int first = tile * kTileRows;
      for (int i = 0; i < kTiles * kTileRows && first + i < at.lanes; i++) {
        float* acc = state.acc + size_t(first + i) * at.value_dim + column;
        for (int v = 0; v < kTileVectors && column + v * kWidth < at.value_dim; v++) {
          const VecF added = load(sums[i / kTileRows][v][i % kTileRows]);
          store(acc + v * kWidth, splat(state.alpha[first + i]) * load(acc + v * kWidth) + added);
        }
      }
    });
  }
}

// AttentionKernels::attend for plain pools of bfloat16.
template <typename Tiles>
inline void attend_by_tiles(
    const AttentionArgs& args, int index, int head_begin, int head_end, float* scratch) {
  const Item item = read_item(args, index);
  const TileLayout at(args, item.num_rows);
  auto packed = reinterpret_cast<__m512i*>(scratch);
  auto weights = reinterpret_cast<WeightRows*>(scratch + at.weights);
  __builtin_memset(weights, 0, at.lane_tiles * kTokenBlocks * sizeof(WeightRows));
  for (int head = head_begin; head < head_end; head++) {
    State state(at, scratch, head - head_begin);
    load_tile_queries(args, item, head, at, reinterpret_cast<QueryRows*>(state.queries));
    state.clear_sums(at);
  }
  Tiles tiles(kWholeTiles);
  auto rows_of = [&](const PoolView& pool, int token) {
    const int count = token < item.token_end ? tokens_in_tile(item, token) : 0;
    return TokenRows<BFloat>(args, pool, item, token, count);
  };
  for (int token = item.token_begin, count; token < item.token_end; token += count) {
    count = tokens_in_tile(item, token);
    const TokenRows<BFloat> keys = rows_of(args.keys, token);
    const TokenRows<BFloat> values = rows_of(args.values, token);
    const TokenRows<BFloat> next_keys = rows_of(args.keys, token + count);
    for (int head = head_begin; head < head_end; head++) {
      State state(at, scratch, head - head_begin);
      score_tile(args, at, tiles, head, keys, values, state, packed);
      softmax_lanes(args, item, at, head, token, count, state);
      mix_tile(args, at, tiles, head, values, next_keys, state, weights, packed);
    }
  }
  for (int head = head_begin; head < head_end; head++) {
    finish<BFloat>(args, item, at, head, State(at, scratch, head - head_begin));
  }
}

}  // namespace mlx_paged::cpu::MLX_PAGED_ISA
