// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// The queries of a work item that one threadgroup handles, for one KV head. A query is a query row
// times a query head of the group; an item's queries are numbered row by row.

#pragma once

#include <metal_stdlib>

#include "block_table.h"
#include "kernel_table.h"

using namespace metal;

// Buffers and params of every attention kernel.
#define PAGED_ATTENTION_BUFFERS(T)                                                         \
  device const T *queries [[buffer(0)]], device const T *key_pool [[buffer(1)]],           \
      device const T *value_pool [[buffer(2)]], device const int *positions [[buffer(3)]], \
      device const int *block_tables [[buffer(4)]],                                        \
      device const paged::WorkItem *work_items [[buffer(5)]],                              \
      device const float *per_head [[buffer(6)]], device T *out [[buffer(7)]],             \
      device float *workspace [[buffer(8)]], constant paged::AttentionParams &params [[buffer(9)]]

namespace paged {

struct QueryTile {
  WorkItem item;
  BlockTable table;
  int num_q_heads;
  int heads;  // per group
  int kv_head;
  int first_query;  // within the item
  int num_queries;  // <= 0: nothing to do, because the item ends earlier or is another launch's

  METAL_FUNC int row(int q) const thread { return item.row_begin + (first_query + q) / heads; }

  METAL_FUNC int head(int q) const thread { return kv_head * heads + (first_query + q) % heads; }

  // Index of query q in [num_rows, num_q_heads].
  METAL_FUNC ulong query(int q) const thread { return ulong(row(q)) * num_q_heads + head(q); }

  // True if results go to the output; otherwise they are partials (see WorkItem).
  METAL_FUNC bool whole() const thread { return item.partial_begin < 0; }

  // Index of query q's result in [num_rows, num_q_heads] of the output or the workspace.
  METAL_FUNC ulong result(int q) const thread {
    int row = (whole() ? item.row_begin : item.partial_begin) + (first_query + q) / heads;
    return ulong(row) * num_q_heads + head(q);
  }

  METAL_FUNC AttentionRow attention_row(
      int q, device const int* positions, device const float* per_head,
      constant AttentionParams& params) const thread {
    return paged::attention_row(
        positions, row(q), per_head, head(q), params.num_q_heads, params.options);
  }

  // Keys of the item that any of these queries sees.
  METAL_FUNC KeyRange
  keys(device const int* positions, constant AttentionParams& params) const thread {
    return keys_of_rows(item, positions, row(0), row(num_queries - 1) + 1, params);
  }
};

METAL_FUNC QueryTile query_tile(
    WorkItem item, device const int* block_tables, constant AttentionParams& params, int kv_head,
    int first_query, int max_queries) {
  QueryTile tile;
  tile.item = item;
  tile.table.blocks = block_tables + ulong(item.sequence) * params.max_blocks;
  tile.table.shift = params.block_shift;
  tile.num_q_heads = params.num_q_heads;
  tile.heads = params.num_q_heads / params.num_kv_heads;
  tile.kv_head = kv_head;
  tile.first_query = first_query;
  int num_rows = item.row_end - item.row_begin;
  bool served = num_rows >= params.min_rows && num_rows <= params.max_rows;
  tile.num_queries = served ? min(max_queries, num_rows * tile.heads - first_query) : 0;
  return tile;
}

}  // namespace paged
