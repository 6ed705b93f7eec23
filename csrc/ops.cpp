// Copyright © 2026 the mlx_paged authors. Apache-2.0.

#include "ops.h"

#include <cmath>
#include <memory>
#include <string>

#include "dense.h"
#include "primitives.h"
#include "validate.h"

namespace mlx_paged {

std::pair<mx::array, mx::array> write_kv(
    const mx::array& key_pool, const mx::array& value_pool, const mx::array& keys,
    const mx::array& values, const mx::array& slot_mapping, mx::StreamOrDevice s_) {
  auto s = mx::to_stream(s_);
  Validator v("write_kv");
  v.pools(key_pool, value_pool, s);
  v.shape(slot_mapping, "slot_mapping", {-1});
  v.int32(slot_mapping, "slot_mapping");
  int num_tokens = slot_mapping.shape(0);
  v.shape(keys, "keys", {num_tokens, key_pool.shape(2), key_pool.shape(3)});
  v.shape(values, "values", {num_tokens, value_pool.shape(2), value_pool.shape(3)});
  v.same_dtype(keys, "keys", key_pool, "key_pool");
  v.same_dtype(values, "values", value_pool, "value_pool");

  auto out = mx::array::make_arrays(
      {key_pool.shape(), value_pool.shape()}, {key_pool.dtype(), value_pool.dtype()},
      std::make_shared<WriteKV>(s),
      {key_pool, value_pool, dense(keys, s), dense(values, s), dense(slot_mapping, s)});
  return {out[0], out[1]};
}

std::vector<mx::array> copy_blocks(
    const std::vector<mx::array>& pools, const mx::array& block_pairs, mx::StreamOrDevice s_) {
  auto s = mx::to_stream(s_);
  Validator v("copy_blocks");
  v.require(!pools.empty(), "pools", "at least one array", "none");
  v.shape(block_pairs, "block_pairs", {-1, 2});
  v.int32(block_pairs, "block_pairs");
  std::vector<mx::Shape> shapes;
  std::vector<mx::Dtype> dtypes;
  for (size_t i = 0; i < pools.size(); i++) {
    auto what = "pools[" + std::to_string(i) + "]";
    v.pool(pools[i], what.c_str(), s);
    v.require(
        pools[i].shape(0) == pools[0].shape(0), "num_blocks of " + what,
        std::to_string(pools[0].shape(0)) + " like pools[0]", pools[i].shape(0));
    shapes.push_back(pools[i].shape());
    dtypes.push_back(pools[i].dtype());
  }
  auto inputs = pools;
  inputs.push_back(dense(block_pairs, s));
  return mx::array::make_arrays(std::move(shapes), dtypes, std::make_shared<CopyBlocks>(s), inputs);
}

std::pair<mx::array, mx::array> gather_kv(
    const mx::array& key_pool, const mx::array& value_pool, const mx::array& block_tables,
    const mx::array& context_lens, int max_context_len, mx::StreamOrDevice s_) {
  auto s = mx::to_stream(s_);
  Validator v("gather_kv");
  v.pools(key_pool, value_pool, s);
  v.shape(block_tables, "block_tables", {-1, -1});
  v.int32(block_tables, "block_tables");
  int num_seqs = block_tables.shape(0);
  v.shape(context_lens, "context_lens", {num_seqs});
  v.int32(context_lens, "context_lens");
  v.require(max_context_len >= 0, "max_context_len", "at least 0", max_context_len);
  int64_t room = int64_t(block_tables.shape(1)) * key_pool.shape(1);
  v.require(
      max_context_len <= room, "max_context_len",
      "at most " + std::to_string(room) + " (the slots of a row of block_tables)", max_context_len);

  auto primitive = std::make_shared<GatherKV>(s, max_context_len);
  std::vector<mx::array> inputs{
      key_pool, value_pool, dense(block_tables, s), dense(context_lens, s)};
  auto shapes = primitive->output_shapes(inputs);
  auto out = mx::array::make_arrays(
      std::move(shapes), {key_pool.dtype(), value_pool.dtype()}, primitive, inputs);
  return {out[0], out[1]};
}

mx::array paged_attention(
    const mx::array& queries, const mx::array& key_pool, const mx::array& value_pool,
    const AttentionPlan& plan, const AttentionOptions& options, mx::StreamOrDevice s_) {
  auto s = mx::to_stream(s_);
  Validator v("paged_attention");
  v.pools(key_pool, value_pool, s);
  v.shape(plan.positions, "positions", {-1});
  v.shape(plan.block_tables, "block_tables", {-1, -1});
  v.shape(plan.work_items, "work_items", {-1, 6});
  v.shape(plan.merge_items, "merge_items", {-1, 4});
  v.int32(plan.positions, "positions");
  v.int32(plan.block_tables, "block_tables");
  v.int32(plan.work_items, "work_items");
  v.int32(plan.merge_items, "merge_items");
  v.shape(queries, "queries", {plan.positions.shape(0), -1, key_pool.shape(3)});
  v.same_dtype(queries, "queries", key_pool, "key_pool");
  int num_q_heads = queries.shape(1);
  int num_kv_heads = key_pool.shape(2);
  v.require(
      num_q_heads > 0 && num_q_heads % num_kv_heads == 0, "num_q_heads",
      "a multiple of num_kv_heads " + std::to_string(num_kv_heads), num_q_heads);
  v.require(std::isfinite(options.scale) && options.scale > 0, "scale", "positive", options.scale);
  v.require(options.window >= 0, "window", "at least 1, or 0 for none", options.window);
  v.require(
      std::isfinite(options.softcap) && options.softcap >= 0, "softcap", "positive, or 0 for none",
      options.softcap);

  std::vector<mx::array> inputs{
      dense(queries, s),
      key_pool,
      value_pool,
      dense(plan.positions, s),
      dense(plan.block_tables, s),
      dense(plan.work_items, s),
      dense(plan.merge_items, s)};
  if (options.sinks) {
    v.shape(*options.sinks, "sinks", {num_q_heads});
    v.require(
        mx::issubdtype(options.sinks->dtype(), mx::floating), "sinks", "floating point",
        options.sinks->dtype());
    inputs.push_back(dense(mx::astype(*options.sinks, mx::float32, s), s));
  }
  return mx::array(
      {queries.shape(0), num_q_heads, value_pool.shape(3)}, queries.dtype(),
      std::make_shared<PagedAttention>(s, options.scale, options.window, options.softcap),
      std::move(inputs));
}

}  // namespace mlx_paged
