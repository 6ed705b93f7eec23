// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Decode attention in 16 bits on NVIDIA's tensor cores. A thread block serves one work item and one
// KV head, like the portable kernels. Its warps take tiles of 16 tokens in turn and combine their
// results at the end.

#pragma once

#include "attention_arguments.h"
#include "attention_output.h"
#include "decode_state.h"
#include "dependent_launch.h"
#include "kv_ring.h"

namespace paged {

// A thread block's share of a decode launch: one KV head of a work item. Heads of an item have
// adjacent blocks, like their keys in memory.
struct DecodeBlock {
  WorkItem item;
  int kv_head;
  int heads;  // per group
  int num_queries;
  bool is_served;  // by this launch
  BlockTable table;

  __device__ __forceinline__
  DecodeBlock(const WorkItem* work_items, const int* block_tables, const AttentionParams& params)
      : item(work_items[blockIdx.x / params.num_kv_heads]),
        kv_head(blockIdx.x % params.num_kv_heads),
        heads(params.num_q_heads / params.num_kv_heads),
        table{block_tables + size_t(item.sequence) * params.max_blocks, params.block_shift} {
    int num_rows = item.row_end - item.row_begin;
    num_queries = num_rows * heads;
    is_served = num_rows >= params.min_rows && num_rows <= params.max_rows;
  }

  // Keys that any of the item's rows sees.
  __device__ __forceinline__ KeyRange
  keys(const int* positions, const AttentionParams& params) const {
    return keys_of_rows(item, positions, item.row_begin, item.row_end, params);
  }

  // Keys of `seen` that query q sees; none past the last query.
  __device__ __forceinline__ KeyRange
  keys_of(int q, KeyRange seen, const int* positions, const AttentionParams& params) const {
    if (q >= num_queries) {
      return {0, 0};
    }
    KeyRange keys = keys_of_row(positions, item.row_begin + q / heads, params);
    return {max(keys.begin, seen.begin), min(keys.end, seen.end)};
  }

  // Elements of query q; null past the last.
  template <int DIM, typename T>
  __device__ __forceinline__ const T* query(
      int q, const T* queries, const AttentionParams& params) const {
    size_t row = size_t(item.row_begin + q / heads) * params.num_q_heads;
    return q < num_queries ? queries + (row + kv_head * heads + q % heads) * DIM : nullptr;
  }

  // The warp's first token; warps take tiles of TOKENS tokens in turn. Without a window it is known
  // before the rows' positions are loaded.
  template <int TOKENS>
  __device__ __forceinline__ int first_token(
      const int* positions, const AttentionParams& params) const {
    int begin = params.options.window == WHOLE_CONTEXT ? item.first_block << params.block_shift
                                                       : keys(positions, params).begin;
    return begin / TOKENS * TOKENS + int(threadIdx.x) / 32 * TOKENS;
  }
};

// Results that a block's warps exchange through shared memory. RING: bytes per warp.
template <int DIM, int QUERIES, int RING = tensor_ring_bytes(DIM, QUERIES)>
struct WarpResults {
  static constexpr int WARPS = tensor_warps(DIM);
  static constexpr int PITCH = tensor_result_pitch(DIM);

  unsigned char* shared;

  // Holds a warp's tiles, and [QUERIES][PITCH] results after those have been read.
  __device__ __forceinline__ unsigned char* ring(int warp) const { return shared + warp * RING; }
  __device__ __forceinline__ float* result(int warp, int q) const {
    return reinterpret_cast<float*>(ring(warp)) + q * PITCH;
  }
  __device__ __forceinline__ float& maximum(int warp, int q) const {
    return reinterpret_cast<float*>(ring(WARPS))[warp * QUERIES + q];
  }
  __device__ __forceinline__ float& sum(int warp, int q) const {
    return reinterpret_cast<float*>(ring(WARPS))[(WARPS + warp) * QUERIES + q];
  }

  template <typename State>
  __device__ __forceinline__ void put(const State& state, int warp, int lane) const {
#pragma unroll
    for (int n = 0; n < QUERIES / TENSOR_QUERIES; n++) {
#pragma unroll
      for (int e = 0; e < 2; e++) {
        int q = n * TENSOR_QUERIES + 2 * (lane % 4) + e;
#pragma unroll
        for (int c = 0; c < DIM / 16; c++) {
          result(warp, q)[c * 16 + lane / 4] = state.result[n][c][e];
          result(warp, q)[c * 16 + lane / 4 + 8] = state.result[n][c][2 + e];
        }
        if (lane < 4) {
          maximum(warp, q) = state.state[n][e].maximum;
          sum(warp, q) = state.state[n][e].sum;
        }
      }
    }
  }

  // Combines four elements of query q over all warps and returns its softmax.
  __device__ __forceinline__ SoftmaxState join(int q, int element, float (&values)[4]) const {
    SoftmaxState joined;
    joined.clear();
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
      joined.maximum = fmaxf(joined.maximum, maximum(w, q));
    }
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
      float factor = rescale(maximum(w, q), joined.maximum);
      joined.sum = fmaf(sum(w, q), factor, joined.sum);
      float4 from = *reinterpret_cast<const float4*>(result(w, q) + element);
      values[0] = fmaf(from.x, factor, values[0]);
      values[1] = fmaf(from.y, factor, values[1]);
      values[2] = fmaf(from.z, factor, values[2]);
      values[3] = fmaf(from.w, factor, values[3]);
    }
    return joined;
  }
};

// Combines the warps' results and writes an item's rows or partials.
template <typename T, int DIM, typename Results>
__device__ __forceinline__ void write_results(
    const Results& meeting, const DecodeBlock& block, const float* per_head, T* out,
    float* workspace, const AttentionParams& params) {
  constexpr int THREADS = 32 * tensor_warps(DIM);
  const WorkItem& item = block.item;
  bool whole = item.partial_begin < 0;
  Partials partials = partials_at(workspace, params.num_partials, params.num_q_heads, DIM);
  for (int i = threadIdx.x; i < block.num_queries * (DIM / 4); i += THREADS) {
    int q = i / (DIM / 4);
    int element = i % (DIM / 4) * 4;
    float values[4] = {};
    SoftmaxState joined = meeting.join(q, element, values);
    int head = block.kv_head * block.heads + q % block.heads;
    size_t row = size_t((whole ? item.row_begin : item.partial_begin) + q / block.heads);
    size_t at = row * params.num_q_heads + head;
    if (whole) {
      float factor = joined.normalizer(per_head, head, params.options);
      unsigned int* to = reinterpret_cast<unsigned int*>(out + at * DIM + element);
      to[0] = pack(values[0] * factor, values[1] * factor, T(0.0f));
      to[1] = pack(values[2] * factor, values[3] * factor, T(0.0f));
      continue;
    }
    store(partials.values + at * DIM + element, values, evict_last());
    if (element == 0) {
      partials.maxima[at] = joined.maximum;
      partials.sums[at] = joined.sum;
    }
  }
}

}  // namespace paged

// Grid: work items x KV heads. Heads of an item are adjacent, like their keys in memory.
template <typename T, int DIM, int COLUMNS>
__global__ void __launch_bounds__(32 * paged::tensor_warps(DIM))
    decode_tensor_entry(ATTENTION_PARAMETERS) {
  using namespace paged;
  constexpr int STEP = tensor_warps(DIM) * TENSOR_TOKENS;
  typedef KVRing<T, DIM> Ring;
  extern __shared__ __align__(128) unsigned char shared[];
  let_next_kernel_begin();

  DecodeBlock block(work_items, block_tables, params);
  if (!block.is_served) {
    wait_for_kernel_before();
    return;
  }
  int warp = threadIdx.x / 32;
  int lane = threadIdx.x % 32;
  WarpResults<DIM, COLUMNS * TENSOR_QUERIES> meeting = {shared};
  int first = block.first_token<TENSOR_TOKENS>(positions, params);
  Ring ring(
      meeting.ring(warp), key_pool, value_pool, block.table,
      block.item.last_block << params.block_shift, [&] { return block.keys(positions, params); },
      params.num_written, params.num_kv_heads, block.kv_head, first, STEP, lane);
  KeyRange seen = ring.seen();
  DecodeState<T, DIM, COLUMNS> state(
      [&](int q) { return block.query<DIM>(q, queries, params); },
      [&](int q) { return block.keys_of(q, seen, positions, params); }, lane);
  for (; first < seen.end; first += STEP) {
    state.attend(ring.advance(lane), first, params, lane);
  }
  join_sums(state.state);
  wait_for_copies<0>();
  __syncwarp();  // The last tile has been read.
  meeting.put(state, warp, lane);
  __syncthreads();

  write_results<T, DIM>(meeting, block, per_head, out, workspace, params);
}
