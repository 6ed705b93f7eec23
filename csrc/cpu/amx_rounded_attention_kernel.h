// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Attention of float32 pools with AMX tiles, for steps with int8 activations: queries, keys, values
// and probabilities are rounded to bfloat16; softmax and sums are float32. Scores have a row for
// each token and a column for each lane, so that keys need no transposing and a vector holds 16
// lanes: their softmax has no sums across a vector. Decode uses it too, so a row has the same bits
// in any step. Denormals count as zero.

#pragma once

#include "amx_attention_kernel.h"

namespace mlx_paged::cpu::MLX_PAGED_ISA {

constexpr int kTokenTiles = kTile / kTileRows;

// Tile operands. Queries and probabilities: a row for each pair of dims or tokens, with the two of
// each lane adjacent. Keys: a row for each token. Values: a row for each dim.
struct alignas(64) PairRows {
  __m512i pairs[kTileRows];
};
struct alignas(64) RoundedRows {
  __m512i rows[kTileRows];
};

// Scores, or sums: a row for each token or dim, and a column for each lane of a tile.
struct alignas(64) LaneColumns {
  VecF rows[kTileRows];
};

// Offsets in a task's scratch, in floats: operands and scores of a tile of tokens, bounds of all
// lanes, then the state of each head.
struct RoundedLayout : Layout {
  int lane_tiles, key_blocks, value_tiles;
  size_t values, weights, tile_scores, bounds, sums;

  RoundedLayout(const AttentionArgs& args, int rows) : Layout(args, rows) {
    constexpr size_t kTileFloats = kTileRows * kTileRowBytes / sizeof(float);
    lane_tiles = round_up(lanes, kTileRows) / kTileRows;
    key_blocks = round_up(args.keys.head_dim, kBFloatBlock) / kBFloatBlock;
    value_tiles = value_dim / kTileRows;
    values = kTokenTiles * key_blocks * kTileFloats;
    weights = values + value_tiles * kTokenBlocks * kTileFloats;
    tile_scores = weights + 2 * kTokenBlocks * kTileFloats;
    bounds = tile_scores + 2 * kTokenTiles * kTileFloats;
    shared_end = bounds + 2 * lane_tiles * kWidth;
    // `acc` has a row for each lane, as finish() wants it.
    place_state(lane_tiles * key_blocks * kTileFloats);
    sums = scores;
    per_head = sums + lane_tiles * value_tiles * kTileFloats;
  }
};

inline size_t rounded_scratch_size(const AttentionArgs& args, int rows, int num_heads) {
  RoundedLayout at(args, rows);
  return at.shared_end + num_heads * at.per_head;
}

// Rounds elements [first, first + kBFloatBlock) of a row of `dim`, with zeros past its end.
inline __m512i round_block(const float* row, int first, int dim, float factor) {
  const VecF low = load_padded(row + first, dim - first) * factor;
  const VecF high = load_padded(row + first + kWidth, dim - first - kWidth) * factor;
  return (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
}

// Rounds two vectors and makes their elements pairs.
inline __m512i rounded_pairs(VecF even, VecF odd) {
  alignas(64) static constexpr uint16_t kOrder[2 * kWidth] = {
      0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
      8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const auto both = (__m512i)_mm512_cvtne2ps_pbh((__m512)odd, (__m512)even);
  return _mm512_permutexvar_epi16(_mm512_load_si512(kOrder), both);
}

// Fills the scaled queries of a lane tile; lanes that do not exist are zero.
inline void round_queries(
    const AttentionArgs& args, const Item& item, int kv_head, const RoundedLayout& at, int tile,
    PairRows* out) {
  const int group = args.num_q_heads / args.num_kv_heads;
  const int dim = args.keys.head_dim;
  for (int block = 0; block < at.key_blocks; block++) {
    for (int i = 0; i < kTileRows; i++) {
      const int lane = tile * kTileRows + i;
      const int64_t row = item.row_begin + lane / group;
      const float* q = static_cast<const float*>(args.queries) +
                       (row * args.num_q_heads + kv_head * group + lane % group) * dim;
      out[block].pairs[i] = lane < at.lanes
                                ? round_block(q, block * kBFloatBlock, dim, args.options.scale)
                                : _mm512_setzero_si512();
    }
    transpose(out[block].pairs);
  }
}

// Rounds the keys of a tile of tokens.
inline void round_keys(
    const TokenRows<float>& keys, int head, int dim, int key_blocks, RoundedRows* out) {
  for (int token = 0; token < kTile; token++) {
    const float* row = keys.row(token, head);
    RoundedRows* to = out + token / kTileRows * key_blocks;
    for (int block = 0; block < key_blocks; block++) {
      to[block].rows[token % kTileRows] = round_block(row, block * kBFloatBlock, dim, 1.0f);
    }
  }
}

// Rounds and transposes 16 dims of the values of a tile of tokens, from `first` on.
inline void round_values(
    const TokenRows<float>& values, int head, int first, int dim, RoundedRows* out) {
  for (int block = 0; block < kTokenBlocks; block++) {
    for (int i = 0; i < kTileRows; i++) {
      const int token = block * kBFloatBlock + 2 * i;
      out[block].rows[i] = rounded_pairs(
          load_padded(values.row(token, head) + first, dim - first),
          load_padded(values.row(token + 1, head) + first, dim - first));
    }
    transpose(out[block].rows);
  }
}

// Sums the products of two tiles of rows `a` and of one or two tiles of columns `b` in tile
// registers: c[i][j] (+)= a[i] x b[j] over `blocks` tiles of each.
template <int Columns, bool Adds, typename Tiles>
inline void multiply_rounded_tiles(
    Tiles& tiles, const RoundedRows* const (&a)[2], const PairRows* const (&b)[2], int blocks,
    LaneColumns* const (&c)[2][2]) {
  constexpr bool kTwo = Columns == 2;
  if constexpr (Adds) {
    tiles.template load<4>(c[0][0], kTileRowBytes);
    tiles.template load<5>(c[1][0], kTileRowBytes);
    if constexpr (kTwo) {
      tiles.template load<6>(c[0][1], kTileRowBytes);
      tiles.template load<7>(c[1][1], kTileRowBytes);
    }
  } else {
    tiles.template zero<4>();
    tiles.template zero<5>();
    tiles.template zero<6>();
    tiles.template zero<7>();
  }
  for (int block = 0; block < blocks; block++) {
    tiles.template load<0>(a[0] + block, kTileRowBytes);
    tiles.template load<2>(b[0] + block, kTileRowBytes);
    tiles.template multiply_bfloats<4, 0, 2>();
    tiles.template load<1>(a[1] + block, kTileRowBytes);
    tiles.template multiply_bfloats<5, 1, 2>();
    if constexpr (kTwo) {
      tiles.template load<3>(b[1] + block, kTileRowBytes);
      tiles.template multiply_bfloats<6, 0, 3>();
      tiles.template multiply_bfloats<7, 1, 3>();
    }
  }
  tiles.template store<4>(c[0][0], kTileRowBytes);
  tiles.template store<5>(c[1][0], kTileRowBytes);
  if constexpr (kTwo) {
    tiles.template store<6>(c[0][1], kTileRowBytes);
    tiles.template store<7>(c[1][1], kTileRowBytes);
  }
}

// The first and last position that each of 16 lanes sees.
struct LaneBounds {
  VecI first, last;
};

// Lanes that do not exist have the bounds of the last one.
inline LaneBounds lane_bounds(
    const AttentionArgs& args, const Item& item, const RoundedLayout& at, int tile) {
  const int group = args.num_q_heads / args.num_kv_heads;
  LaneBounds bounds;
  for (int i = 0; i < kWidth; i++) {
    const int row = item.row_begin + min(tile * kTileRows + i, at.lanes - 1) / group;
    const paged::RowBounds of_row = paged::bounds_of_row(args.positions, row, args.options);
    bounds.first[i] = of_row.first;
    bounds.last[i] = of_row.last;
  }
  return bounds;
}

// 2^x for x <= 0, to 3e-6 relative, for probabilities that keep 8 bits. NaN stays NaN.
inline VecF exp2_roughly(VecF x) {
  constexpr float kZero = -200.0f;  // 2^x rounds to zero
  const __m512 clamped = _mm512_max_ps((__m512)splat(kZero), (__m512)x);
  const __m512 whole = _mm512_roundscale_ps(clamped, 0);  // to the nearest
  const VecF f = (VecF)clamped - (VecF)whole;
  // Minimax polynomial on [-0.5, 0.5].
  VecF p = f * 9.5701013e-3f + 5.5917859e-2f;
  p = p * f + 2.4024744e-1f;
  p = p * f + 6.9312179e-1f;
  p = p * f + 9.9999928e-1f;
  return (VecF)_mm512_scalef_ps((__m512)p, whole);
}

// Turns the scores of 16 lanes, for `count` tokens of a tile from `token` on, into rounded
// probabilities relative to their new running maximum. Returns the factors of earlier sums.
inline VecF softmax_columns(
    const LaneBounds& bounds, int token, int count, LaneColumns* scores, float* row_max,
    float* row_sum, PairRows* weights) {
  const int tile = token - token % kTile;
  VecF* s = scores->rows;  // [kTile]
  const VecI begin = bounds.first > token ? bounds.first : token - VecI{};
  const VecI end = bounds.last < token + count ? bounds.last + 1 : token + count - VecI{};
  if (any((begin > tile) | (end < tile + kTile))) {
    for (int t = 0; t < kTile; t++) {
      s[t] = select((begin <= tile + t) & (end > tile + t), s[t], splat(-kInf));
    }
  }
  VecF largest[4] = {load(row_max), s[1], s[2], s[3]};
  largest[0] = max(s[0], largest[0]);
  for (int t = 4; t < kTile; t += 4) {
    for (int i = 0; i < 4; i++) {
      largest[i] = max(s[t + i], largest[i]);
    }
  }
  const VecF new_max = max(max(largest[0], largest[1]), max(largest[2], largest[3]));
  // As in softmax_tile.
  const VecF reference = select(new_max == -kInf, VecF{}, new_max);
  VecF sums[4] = {};
  for (int t = 0; t < kTile; t += 4) {
    VecF p[4];
    for (int i = 0; i < 4; i++) {
      p[i] = exp2_roughly(s[t + i] - reference);
      sums[i] += p[i];
    }
    __m512i* to = weights[t / kBFloatBlock].pairs + t % kBFloatBlock / 2;
    to[0] = rounded_pairs(p[0], p[1]);
    to[1] = rounded_pairs(p[2], p[3]);
  }
  const VecF alpha = exp2(load(row_max) - reference);
  store(row_max, new_max);
  store(row_sum, load(row_sum) * alpha + ((sums[0] + sums[1]) + (sums[2] + sums[3])));
  return alpha;
}

// Attends to a tile of tokens with one or two lane tiles.
template <int LaneTiles, typename Tiles>
inline void attend_lanes(
    const RoundedLayout& at, Tiles& tiles, int lane_tile, int token, int count, float* scratch,
    const State& state, LaneColumns* acc) {
  auto keys = reinterpret_cast<const RoundedRows*>(scratch);
  auto values = reinterpret_cast<const RoundedRows*>(scratch + at.values);
  auto weights = reinterpret_cast<PairRows*>(scratch + at.weights);
  auto scores = reinterpret_cast<LaneColumns*>(scratch + at.tile_scores);
  auto bounds = reinterpret_cast<const LaneBounds*>(scratch + at.bounds) + lane_tile;
  auto queries = reinterpret_cast<const PairRows*>(state.queries) + lane_tile * at.key_blocks;
  for (int t = 0; t < kTokenTiles; t += 2) {
    multiply_rounded_tiles<LaneTiles, false>(
        tiles, {keys + t * at.key_blocks, keys + (t + 1) * at.key_blocks},
        {queries, queries + at.key_blocks}, at.key_blocks,
        {{scores + t, scores + kTokenTiles + t}, {scores + t + 1, scores + kTokenTiles + t + 1}});
  }
  LaneColumns* sums = acc + lane_tile * at.value_tiles;
  for (int i = 0; i < LaneTiles; i++) {
    const int lane = (lane_tile + i) * kTileRows;
    const VecF alpha = softmax_columns(
        bounds[i], token, count, scores + i * kTokenTiles, state.row_max + lane,
        state.row_sum + lane, weights + i * kTokenBlocks);
    if (any(alpha != 1.0f)) {
      VecF* rows = sums[i * at.value_tiles].rows;
      for (int d = 0; d < at.value_dim; d++) {
        rows[d] *= alpha;
      }
    }
  }
  for (int d = 0; d < at.value_tiles; d += 2) {
    // With an odd number of tiles, the last one is a pair with itself; it is stored twice.
    const int other = min(d + 1, at.value_tiles - 1);
    multiply_rounded_tiles<LaneTiles, true>(
        tiles, {values + d * kTokenBlocks, values + other * kTokenBlocks},
        {weights, weights + kTokenBlocks}, kTokenBlocks,
        {{sums + d, sums + at.value_tiles + d}, {sums + other, sums + at.value_tiles + other}});
  }
}

// Transposes the sums of all lanes into State::acc.
inline void lanes_in_rows(const RoundedLayout& at, const LaneColumns* sums, const State& state) {
  for (int i = 0; i < at.lane_tiles * at.value_tiles; i++) {
    const int lane = i / at.value_tiles * kTileRows;
    __m512i rows[kTileRows];
    __builtin_memcpy(rows, sums[i].rows, sizeof(rows));
    transpose(rows);
    for (int l = 0; l < kTileRows && lane + l < at.lanes; l++) {
      float* to = state.acc + size_t(lane + l) * at.value_dim + i % at.value_tiles * kTileRows;
      store(to, (VecF)rows[l]);
    }
  }
}

// AttentionKernels::attend for plain pools of float32, without options that change logits.
template <typename Tiles>
inline void attend_rounded(
    const AttentionArgs& args, int index, int head_begin, int head_end, float* scratch) {
  const Item item = read_item(args, index);
  const RoundedLayout at(args, item.num_rows);
  auto keys_of_tile = reinterpret_cast<RoundedRows*>(scratch);
  auto values_of_tile = reinterpret_cast<RoundedRows*>(scratch + at.values);
  auto bounds = reinterpret_cast<LaneBounds*>(scratch + at.bounds);
  auto sums_of = [&](int head) {
    return reinterpret_cast<LaneColumns*>(
        scratch + at.shared_end + (head - head_begin) * at.per_head + at.sums);
  };
  for (int tile = 0; tile < at.lane_tiles; tile++) {
    bounds[tile] = lane_bounds(args, item, at, tile);
  }
  for (int head = head_begin; head < head_end; head++) {
    State state(at, scratch, head - head_begin);
    auto queries = reinterpret_cast<PairRows*>(state.queries);
    for (int tile = 0; tile < at.lane_tiles; tile++) {
      round_queries(args, item, head, at, tile, queries + tile * at.key_blocks);
      store(state.row_max + tile * kWidth, splat(-kInf));
      store(state.row_sum + tile * kWidth, VecF{});
    }
    __builtin_memset(
        static_cast<void*>(sums_of(head)), 0, at.lane_tiles * at.value_tiles * sizeof(LaneColumns));
  }
  Tiles tiles(kWholeTiles);
  auto rows_of = [&](const PoolView& pool, int token) {
    const int count = token < item.token_end ? tokens_in_tile(item, token) : 0;
    return TokenRows<float>(args, pool, item, token, count);
  };
  const int fetched = round_up(kTile, at.value_tiles) / at.value_tiles;
  for (int token = item.token_begin, count; token < item.token_end; token += count) {
    count = tokens_in_tile(item, token);
    const TokenRows<float> keys = rows_of(args.keys, token);
    const TokenRows<float> values = rows_of(args.values, token);
    const TokenRows<float> next_keys = rows_of(args.keys, token + count);
    for (int head = head_begin; head < head_end; head++) {
      State state(at, scratch, head - head_begin);
      values.prefetch(0, kTile, head);
      round_keys(keys, head, args.keys.head_dim, at.key_blocks, keys_of_tile);
      for (int i = 0; i < at.value_tiles; i++) {
        next_keys.prefetch(i * fetched, (i + 1) * fetched, head);
        round_values(
            values, head, i * kTileRows, args.values.head_dim, values_of_tile + i * kTokenBlocks);
      }
      for_lane_tiles(at.lane_tiles, [&](int tile, auto lane_tiles) {
        attend_lanes<decltype(lane_tiles)::kCount>(
            at, tiles, tile, token, count, scratch, state, sums_of(head));
      });
    }
  }
  for (int head = head_begin; head < head_end; head++) {
    State state(at, scratch, head - head_begin);
    lanes_in_rows(at, sums_of(head), state);
    finish<float>(args, item, at, head, state);
  }
}

}  // namespace mlx_paged::cpu::MLX_PAGED_ISA
