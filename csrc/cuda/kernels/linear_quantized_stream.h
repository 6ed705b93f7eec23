// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// linear_stream for weights from mx.quantize. A producer warp has the copy engine (TMA) stream
// codes, scales and x through a ring in shared memory; consumer warps multiply.
//
// Unlike linear_quantized.h, this scales codes in 16 bits with one rounding, as prefill does when
// it dequantizes weights: scaling the sums instead would cost work for each row of x.

#pragma once

#include "adapter_units.h"
#include "copy_ring.h"
#include "linear_adapters.h"
#include "linear_quantized.h"
#include "ordered_rows.h"
#include "warpgroup.h"

namespace mlx_paged::cuda {

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

// A block's share of a product: the rows of one weight tile and the columns of one cluster rank,
// one chunk per turn. WHOLE: the block works alone, and all scales arrive with the first chunk,
// stored row by row. WGMMA: for sm_90a, whose products read x from shared memory.
template <
    typename T, CodeFormat FORMAT, int BITS, int GROUP, int TILES, bool WHOLE = false,
    bool WGMMA = false>
struct QuantizedStream {
  static constexpr int kRows = kQuantizedStreamRows;
  static constexpr int kChunk = quantized_stream_chunk(BITS);
  static constexpr QuantizedStreamShape kShape =
      quantized_stream_shape(FORMAT, BITS, GROUP, TILES, WHOLE, WGMMA);
  static constexpr int kSpan = WHOLE ? 1 << 20 : quantized_stream_span(FORMAT, BITS, GROUP);
  static constexpr int kRowBytes = kChunk * BITS / 8;
  static constexpr bool kHasBiases = FORMAT == CodeFormat::affine;
  static constexpr int kScaleBytes = kHasBiases ? 2 : 1;
  static constexpr int kScaleArrays = kHasBiases ? 2 : 1;
  static constexpr int kMultipliers = 8;  // warps
  static constexpr int kThreads = WGMMA ? kQuantizedWgmmaThreads : kQuantizedStreamThreads;
  static constexpr int kXBox = 64;  // columns
  static constexpr int kXBoxBytes = 8 * TILES * kXBox * 2;
  static constexpr int kXBytes = kChunk / kXBox * kXBoxBytes;
  static constexpr int kRun = quantized_stream_run(GROUP);
  static constexpr int kRuns = kChunk / kRun;
  static constexpr int kRunsOfWarp = kRuns / 2;  // adjacent runs
  static constexpr int kGroupsOfWarp = kRunsOfWarp * kRun < GROUP ? 1 : kRunsOfWarp * kRun / GROUP;
  static constexpr int kScaleWords = (kGroupsOfWarp * kScaleBytes + 3) / 4;
  using Group = GroupOf<T, FORMAT, BITS, kRun>;
  using Sums = float[2][TILES][4];
  using Adapters = AddedAdapters<T, kRows, 8 * TILES, kThreads, WGMMA ? 16 : 8>;
  using Units = AdapterUnits<T, 8, 4>;
  static constexpr int kResultBytes = 8 * TILES * kQuantizedStreamPitch * 4;
  static_assert(kShape.stages >= 2 && kShape.scratch <= kQuantizedStreamBytes);

  const unsigned int stages;  // address in shared memory
  const CopyRing<kShape.stages> ring;
  const int num_ranks;
  const int rank;
  int tile_of_weight;
  const int which;  // index of the weight
  int first_chunk;
  int num_turns;    // can be 0 for the last ranks
  int whole_pitch;  // bytes between the scales of consecutive rows
  int last_group;

  __device__ __forceinline__ QuantizedStream(const LinearParams& params, unsigned int shared)
      : stages(shared),
        ring{stages + kShape.barriers},
        num_ranks(cluster_size()),
        rank((blockIdx.x - params.adapters.num_blocks) % num_ranks),
        tile_of_weight((blockIdx.x - params.adapters.num_blocks) / num_ranks),
        which(weight_of_block(params, kRows, tile_of_weight)) {
    divide(params);
  }

  // A block that computes a tile of the first weight alone, without a cluster.
  __device__ __forceinline__
  QuantizedStream(const LinearParams& params, unsigned int shared, int tile)
      : stages(shared),
        ring{stages + kShape.barriers},
        num_ranks(1),
        rank(0),
        tile_of_weight(tile),
        which(0) {
    divide(params);
  }

  __device__ __forceinline__ void divide(const LinearParams& params) {
    // Copies fill columns past the end of the last chunk with zeros.
    const int num_chunks = (params.k + kChunk - 1) / kChunk;
    const int of_rank = (num_chunks + num_ranks - 1) / num_ranks;
    first_chunk = rank * of_rank;
    num_turns = min(of_rank, num_chunks - first_chunk);
    whole_pitch = params.k / GROUP * kScaleBytes;
    last_group = params.k / GROUP - 1;
  }
  __device__ __forceinline__ int pitch() const { return WHOLE ? whole_pitch : 16; }

  // First of the block's rows of x. Computed where it is needed, so that it holds no register.
  __device__ __forceinline__ static int first_x() { return blockIdx.y * (8 * TILES); }

  // First of the warp's 32 rows in the tile.
  __device__ __forceinline__ static int first_row() { return threadIdx.x / 32 % 4 * 32; }

  // Called by the first thread before any other method.
  __device__ __forceinline__ void begin_ring() const {
    ring.begin(kMultipliers);
    if constexpr (WGMMA) {
      for (Turn turn; turn.stage < kShape.stages; turn.stage++) {
        store_shared_word(counter(turn), 0);
      }
    }
  }

  // begin_ring(), called by all threads.
  __device__ __forceinline__ void begin() const {
    if (threadIdx.x == 0) {
      begin_ring();
    }
    __syncthreads();
  }

  // Position of a chunk in the ring. Advances by counting, because divisions would cost more than
  // the work on the chunk. The scales of a span arrive with its first chunk.
  struct Turn {
    int number = 0;
    int stage = 0;
    int round = 0;  // how often the stage was used before
    int in_span;
    int slot = 0;

    __device__ __forceinline__ void advance() {
      number++;
      if (++stage == kShape.stages) {
        stage = 0;
        round++;
      }
      if (++in_span == kSpan) {
        in_span = 0;
        slot = slot + 1 == kShape.slots ? 0 : slot + 1;
      }
    }
    __device__ __forceinline__ bool begins_span() const { return number == 0 || in_span == 0; }
  };

  __device__ __forceinline__ Turn first_turn() const {
    Turn turn;
    turn.in_span = first_chunk % kSpan;
    return turn;
  }

  __device__ __forceinline__ unsigned int codes_of(const Turn& turn) const {
    return stages + turn.stage * kShape.stage_bytes;
  }
  __device__ __forceinline__ unsigned int xs_of(const Turn& turn) const {
    return codes_of(turn) + kShape.codes_bytes;
  }
  __device__ __forceinline__ unsigned int scales_of(const Turn& turn) const {
    return stages + kShape.stages * kShape.stage_bytes + turn.slot * kShape.scales_bytes;
  }

  // First rows of a tile, which spans two runs of a weight: gate and up, or the halves of a head.
  // The weight starts at row `first_row` of its arrays.
  struct Sources {
    const QuantizedMaps::Weight* low;
    const QuantizedMaps::Weight* high;
    int low_row;
    int high_row;
    bool high_is_up;
  };

  __device__ __forceinline__ Sources
  sources_of(const LinearParams& params, const QuantizedMaps& maps, int first_row) const {
    const TileRow low = row_of_tile<kRows, kRows>(params, tile_of_weight, 0);
    const TileRow high = row_of_tile<kRows, kRows>(params, tile_of_weight, kRows / 2);
    const auto* of_low = &maps.weights[which];
    return {
        of_low, high.is_up ? &maps.weights[1] : of_low, first_row + low.of_weight,
        first_row + high.of_weight, high.is_up};
  }

  // Starts the copies of a turn's weights and expects `x_bytes` of x as well. Called by one thread.
  template <typename Scales>
  __device__ __forceinline__ void copy_weights(
      const Sources& from, const Turn& turn, int x_bytes, Scales scales_of_part) const {
    const paged::CachePolicy once = paged::evict_first();
    const bool begins = turn.begins_span();
    const int scales_bytes = WHOLE ? kRows * kScaleArrays * pitch() : kShape.scales_bytes;
    const int bytes = kShape.codes_bytes + x_bytes + (begins ? scales_bytes : 0);
    if constexpr (WGMMA) {
      ring.expect_at_once(turn.stage, bytes);
    } else {
      ring.expect(turn.stage, turn.round, bytes);
    }
    const unsigned int codes = codes_of(turn);
    const int chunk = first_chunk + turn.number;
    const int word = chunk * (kRowBytes / 4);
    ring.copy(turn.stage, codes, &from.low->codes, word, from.low_row, once);
    ring.copy(
        turn.stage, codes + kShape.codes_bytes / 2, &from.high->codes, word, from.high_row, once);
    if (begins) {
      const unsigned int to = scales_of(turn);
      const int half = kRows / 2 * pitch();
      if constexpr (WHOLE) {
        auto copy_half = [&](bool is_bias, unsigned int at, bool is_up, int row) {
          const unsigned char* from = scales_of_part(is_up, is_bias) + size_t(row) * pitch();
          ring.copy_bytes(turn.stage, at, from, half, once);
        };
#pragma unroll
        for (int array = 0; array < kScaleArrays; array++) {
          copy_half(array == 1, to + 2 * array * half, false, from.low_row);
          copy_half(array == 1, to + (2 * array + 1) * half, from.high_is_up, from.high_row);
        }
      } else {
        const int group = (chunk - turn.in_span) * kChunk / GROUP;
        ring.copy(turn.stage, to, &from.low->scales, group, from.low_row, once);
        ring.copy(turn.stage, to + half, &from.high->scales, group, from.high_row, once);
        if constexpr (kHasBiases) {
          ring.copy(turn.stage, to + 2 * half, &from.low->biases, group, from.low_row, once);
          ring.copy(turn.stage, to + 3 * half, &from.high->biases, group, from.high_row, once);
        }
      }
    }
  }

  // Copies everything this block reads; with WGMMA, only the first stages. Called by one warp or by
  // its first thread alone. The weight starts at row `first_row` of its arrays. Each lane waits for
  // the kernel that writes x, and then calls `copy_x(turn)`, which copies `x_bytes`. With
  // `waits_later`, the caller does what comes after the first weights. WHOLE:
  // `scales_of_part(is_up, is_bias)` returns the start of an array.
  template <typename Scales, typename CopyX>
  __device__ __forceinline__ void copy(
      const LinearParams& params, const QuantizedMaps& maps, int first_row, int x_bytes, int lane,
      Scales scales_of_part, CopyX copy_x, bool waits_later = false) const {
    const Sources from = sources_of(params, maps, first_row);
    auto copy_of_weight = [&](const Turn& turn) {
      if (lane == 0) {
        copy_weights(from, turn, x_bytes, scales_of_part);
      }
    };
    Turn turn = first_turn();
    for (; turn.number < turns_ahead(); turn.advance()) {
      copy_of_weight(turn);  // No kernel writes weights, so this need not wait.
    }
    paged::let_next_kernel_begin();
    if (waits_later) {
      return;
    }
    paged::wait_for_kernel_before();
    copy_x_ahead(copy_x);
    for (; !WGMMA && turn.number < num_turns; turn.advance()) {
      copy_of_weight(turn);
      copy_x(turn);
    }
  }

  // The turns whose copies start at once.
  __device__ __forceinline__ int turns_ahead() const { return min(kShape.stages, num_turns); }

  template <typename CopyX>
  __device__ __forceinline__ void copy_x_ahead(CopyX copy_x) const {
#pragma unroll 1
    for (Turn turn = first_turn(); turn.number < turns_ahead(); turn.advance()) {
      copy_x(turn);
    }
  }

  // Copies a turn's boxes of x from row `row` on. Called by one thread.
  __device__ __forceinline__ void copy_rows(
      const CUtensorMap& map, const Turn& turn, unsigned int to, int row) const {
#pragma unroll
    for (int b = 0; b < kChunk / kXBox; b++) {
      const int column = (first_chunk + turn.number) * kChunk + b * kXBox;
      ring.copy(turn.stage, to + b * kXBoxBytes, &map, column, row, paged::evict_last());
    }
  }

  // Address of a lane's codes within a stage, for the warp's first run.
  __device__ __forceinline__ static unsigned int codes_of_lane(
      int first_row, int first_run, int lane) {
    const int row = lane / 4;
    return (first_row + row) * kRowBytes + codes_in_row(first_run, row, lane % 4);
  }

  // Packed scales of a lane's two rows (r and r + 8 of sixteen) for all of the warp's runs in one
  // turn.
  struct Scales {
    unsigned int words[2][kScaleArrays][kScaleWords];

    // Scales of run `i`.
    __device__ __forceinline__ Scaling<Group> of(int i, int half) const {
      const int group = i * kRun / GROUP;
      auto both = [&](int array) -> unsigned int {
        const unsigned int word = words[half][array][group * kScaleBytes / 4];
        const int at = group * kScaleBytes % 4;
        if constexpr (kHasBiases) {
          return __byte_perm(word, 0, at == 0 ? 0x1010 : 0x3232);
        } else {
          return scale_of_code<T>(word >> 8 * at & 0xff) * 0x10001u;
        }
      };
      if constexpr (kHasBiases) {
        return {both(0), both(1)};
      } else {
        return {both(0), 0};
      }
    }
  };

  // Loads the scales of rows `16 m` to `16 m + 15` of the warp.
  __device__ __forceinline__ Scales
  load_scales(const Turn& turn, int first_row, int first_run, int m, int lane) const {
    const int group = (turn.in_span * kChunk + first_run * kRun) / GROUP;  // within the span
    Scales scales;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const unsigned int row =
          scales_of(turn) + (first_row + m * 16 + half * 8 + lane / 4) * pitch();
#pragma unroll
      for (int array = 0; array < kScaleArrays; array++) {
        load_scales_of_row(scales.words[half][array], row + array * (kRows * pitch()), group);
      }
    }
    return scales;
  }

  // A lane's codes of one run, for rows r and r + 8 of sixteen.
  struct Codes {
    unsigned int words[2][Group::kWords];

    // Converts the codes to left operands of the run's products.
    __device__ __forceinline__ void scale_to(
        paged::FragmentA (&weights)[Group::kProducts], const Scales& scales, int i) const {
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const Scaling<Group> scaling = scales.of(i, half);
#pragma unroll
        for (int p = 0; p < Group::kPairs; p++) {
          weights[p / 2][p % 2 * 2 + half] = scaling.pair(words[half], p);
        }
      }
    }
  };

  // Loads the codes of run `i` for rows `16 m` to `16 m + 15` of the warp. `codes`: codes_of_lane.
  __device__ __forceinline__ Codes
  load_codes(const Turn& turn, unsigned int codes, int i, int m, int lane) const {
    const unsigned int of_run =
        codes_of(turn) + (kSwizzles ? codes ^ i * kRunBytes : codes + i * kRunBytes);
    Codes loaded;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      load_words(loaded.words[half], of_run + (2 * m + half) * (8 * kRowBytes), lane % 4);
      Group::align(lane % 4, loaded.words[half]);
    }
    return loaded;
  }

  // Multiplies every turn of the ring: 32 rows of the weight from `first_row` on, and half of each
  // turn's columns.
  __device__ __forceinline__ void multiply(Sums& sums, int first_row, int half, int lane) const {
    // Offsets of the lane's data in a stage: its row's codes, and eight columns of its row of x.
    const int first_run = half * kRunsOfWarp;
    const int first_column = first_run * kRun + lane % 4 * Group::kColumns;
    const unsigned int codes = codes_of_lane(first_row, first_run, lane);
    const unsigned int x_of_lane = kShape.codes_bytes + first_column / kXBox * kXBoxBytes +
                                   paged::tile_offset<8>(lane / 4, first_column % kXBox / 8);
    for (Turn turn = first_turn(); turn.number < num_turns; turn.advance()) {
      ring.wait_until_full(turn.stage, turn.round);
      Scales scales[2];
#pragma unroll
      for (int m = 0; m < 2; m++) {
        scales[m] = load_scales(turn, first_row, first_run, m, lane);
      }
#pragma unroll
      for (int i = 0; i < kRunsOfWarp; i++) {
        const int column = i * kRun;
        const unsigned int x =
            (codes_of(turn) + x_of_lane ^ column % kXBox * 2) + column / kXBox * kXBoxBytes;
        paged::FragmentA weights[2][Group::kProducts];
#pragma unroll
        for (int m = 0; m < 2; m++) {
          load_codes(turn, codes, i, m, lane).scale_to(weights[m], scales[m], i);
        }
#pragma unroll
        for (int t = 0; t < TILES; t++) {
#pragma unroll
          for (int h = 0; h < Group::kProducts / 2; h++) {
            // The next eight columns are adjacent (see tile_offset).
            const Eight v = Group::pairs_of(load_shared((x ^ h * 16) + t * (8 * 128)));
#pragma unroll
            for (int m = 0; m < 2; m++) {
              paged::multiply_accumulate(sums[m][t], weights[m][2 * h], {v.x, v.y}, T(0.0f));
              paged::multiply_accumulate(sums[m][t], weights[m][2 * h + 1], {v.z, v.w}, T(0.0f));
            }
          }
        }
      }
      ring.release(
          turn.stage, lane, none_after(sums[0], last_group) | none_after(sums[1], last_group));
    }
  }

  // Address of the counter of warps that have read a stage.
  __device__ __forceinline__ unsigned int counter(const Turn& turn) const {
    return stages + kShape.barriers + copy_ring_bytes(kShape.stages) + turn.stage * 4;
  }

#ifdef PAGED_HAS_WGMMA
  // Reorders a turn's x in place into code order (CodeOrder), so that 16 adjacent columns belong to
  // one product. Called by all consumer warps.
  __device__ __forceinline__ void order_x(const Turn& turn) const {
    static_assert(code_order(BITS, GROUP) == CodeOrder{kRun, Group::kColumnsApart});
    constexpr int kPieces = Group::kProducts / 2;  // of eight columns, per lane and run
    constexpr int kUnits = 8 * TILES * kRuns * kPieces;
    constexpr int kAtOnce = 32 * kMultipliers;
    static_assert(kUnits % 32 == 0);
    // Eight threads take eight rows, which lie in different banks. Pieces of a row differ in other
    // address bits.
    const int lane = threadIdx.x % 32;
    const int piece = lane / 8 % kPieces;
#pragma unroll
    for (int first = 0; first < kUnits; first += kAtOnce) {
      const int unit = first + threadIdx.x;
      if (kUnits % kAtOnce != 0 && unit >= kUnits) {
        break;
      }
      const int tile = unit / (8 * kPieces) % TILES;
      const int column = unit / (8 * kPieces * TILES) * kRun;  // first column of the run
      const unsigned int rows = xs_of(turn) + column / kXBox * kXBoxBytes + tile * (8 * 128);
      const unsigned int of_box = column % kXBox * 2;
      const unsigned int from = rows + (paged::tile_offset<8>(lane % 8, piece) ^ of_box);
      const unsigned int to = rows + (paged::tile_offset<8>(lane % 8, piece * 4) ^ of_box);
      Eight v[4];
#pragma unroll
      for (int c = 0; c < 4; c++) {
        v[c] = Group::pairs_of(load_shared(from ^ c * kPieces * 16));
      }
      __syncwarp();  // Other lanes have read the addresses that this lane writes.
      store_shared(to, make_uint4(v[0].x, v[1].x, v[2].x, v[3].x));
      store_shared(to ^ 16, make_uint4(v[0].y, v[1].y, v[2].y, v[3].y));
      store_shared(to ^ 32, make_uint4(v[0].z, v[1].z, v[2].z, v[3].z));
      store_shared(to ^ 48, make_uint4(v[0].w, v[1].w, v[2].w, v[3].w));
    }
    show_to_products();
  }

  // multiply() by warpgroup products, which read x from shared memory. While one batch of products
  // runs, the next batch's weights are scaled, or the next turn's x is reordered unless it arrives
  // in code order (`is_ordered`). A stage's x is in order once every warp has released the stage.
  // The last warp to finish reading a stage calls `copy(turn)` to refill it.
  template <typename Copy>
  __device__ __forceinline__ void multiply_together(
      Sums& sums, int first_row, int half, int lane, bool is_ordered, Copy copy) const {
    const int first_run = half * kRunsOfWarp;
    const unsigned int codes_begin = codes_of_lane(first_row, first_run, lane);
    auto order = [&](const Turn& turn) {
      ring.wait_until_full(turn.stage, turn.round);
      order_x(turn);
      ring.release(turn.stage, lane);
    };
    Turn turn = first_turn();
    Turn later = turn;
#pragma unroll
    for (int i = 0; i < kShape.stages; i++) {
      later.advance();
    }
    if (!is_ordered && num_turns > 0) {
      order(turn);
    }
    while (turn.number < num_turns) {
      Turn next = turn;
      next.advance();
      if (is_ordered) {
        ring.wait_until_full(turn.stage, turn.round);
      }
      Scales scales[2];
#pragma unroll
      for (int m = 0; m < 2; m++) {
        scales[m] = load_scales(turn, first_row, first_run, m, lane);
      }
      Codes codes = load_codes(turn, codes_begin, 0, 0, lane);
#pragma unroll
      for (int i = 0; i < kRunsOfWarp; i++) {
        const int column = i * kRun;
        const unsigned int x =
            first_columns(xs_of(turn) + (first_run * kRun + column) / kXBox * kXBoxBytes) +
            column % kXBox / 16 * kNextColumns;
#pragma unroll
        for (int m = 0; m < 2; m++) {
          paged::FragmentA weights[Group::kProducts];
          codes.scale_to(weights, scales[m], i);
          // Load the next batch's codes while this batch runs.
          if (m == 0 || i + 1 < kRunsOfWarp) {
            codes = load_codes(turn, codes_begin, i + m, 1 - m, lane);
          }
          if (i == 0 && m == 0 && !is_ordered) {
            ring.wait_until_released(turn.stage, turn.round);
          }
          begin_products();
#pragma unroll
          for (int h = 0; h < Group::kProducts; h++) {
            start_product<false, false>(sums[m], weights[h], x + h * kNextColumns, T(0.0f));
          }
          commit_products();
          wait_for_products<1>(sums[m]);
        }
      }
      if (!is_ordered && next.number < num_turns) {
        order(next);
      }
      wait_for_products<0>(sums[0]);
      take_product(sums[1]);
      __syncwarp();
      if (lane == 0 && later.number < num_turns && is_last(counter(turn), kMultipliers)) {
        copy(later);
      }
      __syncwarp();
      turn = next;
      later.advance();
    }
  }
#endif

  // Stores the block's sums, added over both warps of each pair, as [row of x][row of the weight]
  // in the ring's memory, which has been read by now. Called by all threads.
  __device__ __forceinline__ float* store(unsigned char* shared, const Sums& sums) const {
    __syncthreads();  // The ring has been read.
    paged::wait_for_kernel_before();
    float* results = reinterpret_cast<float*>(shared);
    const int warp = threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int of_pair = 1; of_pair >= 0; of_pair--) {
      if (warp / 4 == of_pair) {
#pragma unroll
        for (int m = 0; m < 2; m++) {
#pragma unroll
          for (int t = 0; t < TILES; t++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
              const int at = t * 8 + lane % 4 * 2 + i % 2;
              const int output = first_row() + m * 16 + i / 2 * 8 + lane / 4;
              float& result = results[at * kQuantizedStreamPitch + output];
              const float sum = sums[m][t][i] * Scaling<Group>::kPerSum;
              result = of_pair == 1 ? sum : sum + result;
            }
          }
        }
      }
      __syncthreads();
    }
    return results;
  }

  // multiply() by the consumer warps, then store(). Called by all threads.
  __device__ __forceinline__ float* multiply_and_store(unsigned char* shared) const {
    Sums sums = {};
    const int warp = threadIdx.x / 32;
    if (warp < kMultipliers) {
      multiply(sums, first_row(), warp / 4, threadIdx.x % 32);
    }
    return store(shared, sums);
  }

  // Computes this block's units of adapters. `sums`: shared memory for them. Called by the warps
  // that multiply.
  template <typename Begin>
  __device__ __forceinline__ static void multiply_adapters(
      const T* x, const LinearParams& params, const AdapterOperands<T>& operands,
      unsigned char* sums, Begin begin) {
    auto chunk_of = [&](const T* row, int chunk) {
      if constexpr (WGMMA) {
        constexpr CodeOrder kOrder = code_order(BITS, GROUP);
        if (params.x_is_ordered) {
          return InOrder<kOrder.run, kOrder.apart>::read(as_written<Eight>(row), chunk);
        }
      }
      return load_x(row + 8 * chunk);
    };
    Units{params, operands}.run(x, reinterpret_cast<float4*>(sums), chunk_of, begin);
  }

  __device__ __forceinline__ Adapters
  adapters_of(const LinearParams& params, const AdapterOperands<T>& operands) const {
    return {params, operands, which, tile_of_weight, stages + kResultBytes, false, -1, {}, {}};
  }

  // Prefetches what adapters need, by warps that do not start copies. Called by all threads. With
  // many tiles, that is before the ring begins: afterwards, the compiler would keep more in
  // registers during the product, where none are to spare.
  __device__ __forceinline__ void fetch_adapters(
      const LinearParams& params, const AdapterOperands<T>& operands) const {
    adapters_of(params, operands)
        .template fetch<kMultipliers / 2, kMultipliers / 2>(rank, num_ranks);
  }

  // Finishes this block's share of the cluster's outputs. Called by all threads after store().
  __device__ __forceinline__ void finish(
      const LinearParams& params, const LinearPart<T> (&parts)[kLinearMaxWeights],
      const AdapterOperands<T>& operands, const T* residual, const float* rotations,
      const int* slots, float* results) const {
    static_assert(kResultBytes + Adapters::kBytes <= kShape.barriers);
    if (params.adapters.count == 0) {
      cluster_barrier();
    }
    finish_rows<T, kRows, kRows>(
        params, parts, which, tile_of_weight, residual, rotations, slots,
        [](int at) { return first_x() + at; }, min(params.num_rows - first_x(), 8 * TILES),
        rank * kThreads + threadIdx.x, num_ranks * kThreads,
        [&](int at, int output) {
          if (num_ranks == 1) {
            return *reinterpret_cast<const float4*>(results + at * kQuantizedStreamPitch + output);
          }
          const unsigned int address = stages + (at * kQuantizedStreamPitch + output) * 4;
          float4 sum[kLinearParts];
#pragma unroll
          for (int r = 0; r < kLinearParts; r++) {
            sum[r] = r < num_ranks ? load_of_rank(address, r) : make_float4(0, 0, 0, 0);
          }
          return sum_of_parts(sum);
        },
        adapters_of(params, operands));
    end_of_cluster();
  }

 private:
  static constexpr int kRunBytes = kRun * BITS / 8;
  static constexpr bool kSwizzles = quantized_stream_swizzles(BITS);

  // Offset of a lane's codes of a run within a row, or of the run if codes do not start at a word.
  __device__ __forceinline__ static unsigned int codes_in_row(int run, int row, int column) {
    return kSwizzles ? run * kRunBytes + column * (Group::kWords * 4) ^ row * 16 : run * kRunBytes;
  }

  __device__ __forceinline__ static void load_words(
      unsigned int (&words)[Group::kWords], unsigned int from, int column) {
    if constexpr (kSwizzles) {
      Group::load_words(from, words);
    } else {
      Group::load(from, column, words);
    }
  }

  // `row`: address of a row's scales.
  __device__ __forceinline__ void load_scales_of_row(
      unsigned int (&words)[kScaleWords], unsigned int row, int group) const {
    const unsigned int from = row + group * kScaleBytes;
    if constexpr (WHOLE) {
#pragma unroll
      for (int i = 0; i < kScaleWords; i++) {
        words[i] = 0;
      }
#pragma unroll
      for (int g = 0; g < kGroupsOfWarp; g++) {
        // Columns past the end take the last group's scale; their x are zeros.
        const unsigned int at = row + min(group + g, last_group) * kScaleBytes;
        const unsigned int scale = kScaleBytes == 2 ? load_shared_half(at) : load_shared_byte(at);
        words[g * kScaleBytes / 4] |= scale << g * kScaleBytes % 4 * 8;
      }
    } else if constexpr (kGroupsOfWarp * kScaleBytes == 8) {
      load_shared_pair(from, words[0], words[1]);
    } else if constexpr (kGroupsOfWarp * kScaleBytes == 4) {
      words[0] = load_shared_word(from);
    } else {
      static_assert(kGroupsOfWarp * kScaleBytes == 2);
      words[0] = load_shared_half(from);
    }
  }
};

#endif

// TILES: tiles of eight rows of x. Grid: (weight tiles x blocks per cluster, x rows). A launch with
// adapters has one block along y.
template <typename T, CodeFormat FORMAT, int BITS, int GROUP, int TILES>
__global__ void __launch_bounds__(kQuantizedStreamThreads, quantized_stream_blocks(TILES))
    linear_quantized_stream_entry(
        QUANTIZED_PARAMETERS, const __grid_constant__ QuantizedMaps maps) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  using Stream = QuantizedStream<T, FORMAT, BITS, GROUP, TILES>;
  extern __shared__ __align__(1024) unsigned char shared[];
  const LinearPart<T> parts_of_launch[kLinearMaxWeights] = QUANTIZED_PARTS;
  const AdapterOperands<T> adapter_operands = ADAPTER_OPERANDS;
  if (int(blockIdx.x) < params.adapters.num_blocks) {
    paged::let_next_kernel_begin();
    if (threadIdx.x < 32 * Stream::kMultipliers) {
      Stream::multiply_adapters(x, params, adapter_operands, shared, [] {});
    }
    return paged::wait_for_kernel_before();
  }
  const Stream stream(params, paged::shared_address(shared));
  stream.fetch_adapters(params, adapter_operands);
  stream.begin();
  if (threadIdx.x == 32 * Stream::kMultipliers) {
    stream.copy(
        params, maps, 0, Stream::kXBytes, 0, [](bool, bool) { return nullptr; },
        [&](const auto& turn) {
          stream.copy_rows(maps.x, turn, stream.xs_of(turn), Stream::first_x());
        });
  }
  float* results = stream.multiply_and_store(shared);
  stream.finish(params, parts_of_launch, adapter_operands, residual, rotations, slots, results);
#endif
}

// The same result, to the bit, by warpgroup products of sm_90a. There is no producer warp: two
// blocks of eight warps leave 128 registers per thread, two of nine would leave 96. One block of 16
// tiles has as many sums.
template <typename T, CodeFormat FORMAT, int BITS, int GROUP, int TILES>
__global__ void __launch_bounds__(kQuantizedWgmmaThreads, quantized_wgmma_blocks(TILES))
    linear_quantized_wgmma_entry(QUANTIZED_PARAMETERS, const __grid_constant__ QuantizedMaps maps) {
#ifdef PAGED_HAS_WGMMA
  using Stream = QuantizedStream<T, FORMAT, BITS, GROUP, TILES, false, true>;
  extern __shared__ __align__(1024) unsigned char shared[];
  const LinearPart<T> parts_of_launch[kLinearMaxWeights] = QUANTIZED_PARTS;
  const AdapterOperands<T> adapter_operands = ADAPTER_OPERANDS;
  const Stream stream(params, paged::shared_address(shared));
  auto no_parts = [](bool, bool) { return nullptr; };
  auto copy_x = [&](const auto& turn) {
    stream.copy_rows(maps.x, turn, stream.xs_of(turn), Stream::first_x());
  };
  const bool has_units_alone = int(blockIdx.x) < params.adapters.num_blocks;
  const bool has_units =
      TILES <= kAdapterUnitTiles ? int(blockIdx.x) < params.adapters.num_workers : has_units_alone;
  if (!has_units_alone) {
    if constexpr (TILES > kAdapterUnitTiles) {
      stream.fetch_adapters(params, adapter_operands);
    }
    if (threadIdx.x == 0) {
      stream.begin_ring();
      stream.copy(params, maps, 0, Stream::kXBytes, 0, no_parts, copy_x, has_units);
    }
    if constexpr (TILES <= kAdapterUnitTiles) {
      stream.fetch_adapters(params, adapter_operands);
    }
    __syncthreads();
  }
  if (has_units) {
    paged::let_next_kernel_begin();
    unsigned char* sums = shared + (has_units_alone ? 0 : Stream::kShape.scratch);
    Stream::multiply_adapters(x, params, adapter_operands, sums, [&] {
      if (threadIdx.x == 0 && !has_units_alone) {
        stream.copy_x_ahead(copy_x);  // The ring fills meanwhile.
      }
    });
    if (has_units_alone) {
      return;
    }
  }
  const typename Stream::Sources sources = stream.sources_of(params, maps, 0);
  typename Stream::Sums sums = {};
  stream.multiply_together(
      sums, Stream::first_row(), same_in_warp(threadIdx.x / 128), threadIdx.x % 32,
      params.x_is_ordered, [&](const auto& turn) {
        stream.copy_weights(sources, turn, Stream::kXBytes, no_parts);
        copy_x(turn);
      });
  // Recomputed here so that it holds no registers during the products.
  const Stream same(params, paged::shared_address(shared));
  float* results = same.store(shared, sums);
  same.finish(params, parts_of_launch, adapter_operands, residual, rotations, slots, results);
#endif
}

}  // namespace mlx_paged::cuda
