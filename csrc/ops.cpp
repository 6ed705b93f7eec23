// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Python entry points of the operations that GPUs also run: check arguments and build graph nodes.
// Ids and slots, whose values exist only when the graph runs, are checked then (KernelNode::check).

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <memory>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>

#include "bindings.h"
#include "dense.h"
#include "primitives.h"
#include "validate.h"

namespace mlx_paged {

bool check_enabled() {
  const char* value = std::getenv("MLX_PAGED_CHECK");
  return value && std::string_view(value) == "1";
}

namespace {

std::pair<mx::array, mx::array> write_kv(
    const mx::array& key_pool, const mx::array& value_pool, const mx::array& keys,
    const mx::array& values, const mx::array& slot_mapping, mx::StreamOrDevice s_) {
  auto s = mx::to_stream(s_);
  Validator v("write_kv");
  v.pools(key_pool, value_pool, s);
  v.shape(slot_mapping, "slot_mapping", {-1});
  v.int32(slot_mapping, "slot_mapping");
  int num_tokens = slot_mapping.shape(0);
  v.shape(keys, "keys", {num_tokens, key_pool.shape(2), layout_of(key_pool).head_dim});
  v.shape(values, "values", {num_tokens, value_pool.shape(2), layout_of(value_pool).head_dim});
  if (format_of(key_pool.dtype()) == PoolFormat::plain) {
    v.same_dtype(keys, "keys", key_pool, "key_pool");
    v.same_dtype(values, "values", value_pool, "value_pool");
  } else {
    v.floating(keys, "keys");
    v.same_dtype(values, "values", keys, "keys");
  }

  auto out = mx::array::make_arrays(
      {key_pool.shape(), value_pool.shape()}, {key_pool.dtype(), value_pool.dtype()},
      std::make_shared<WriteKV>(s),
      {key_pool, value_pool, dense(keys, s), dense(values, s), dense(slot_mapping, s)});
  return {out[0], out[1]};
}

Arrays copy_blocks(const Arrays& pools, const mx::array& block_pairs, mx::StreamOrDevice s_) {
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
    const mx::array& context_lens, int max_context_len, std::optional<mx::Dtype> dtype,
    mx::StreamOrDevice s_) {
  auto s = mx::to_stream(s_);
  Validator v("gather_kv");
  v.pools(key_pool, value_pool, s);
  auto keys = layout_of(key_pool), pool_values = layout_of(value_pool);
  if (keys.format == PoolFormat::plain) {
    auto own = key_pool.dtype();
    v.require(!dtype || *dtype == own, "dtype", own, dtype.value_or(own));
    dtype = own;
  } else {
    v.require(dtype.has_value(), "dtype", "given for quantized pools", "none");
    v.require(is_supported(*dtype), "dtype", "float32, float16 or bfloat16", *dtype);
  }
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
  int max_len = std::numeric_limits<int>::max() / std::max(keys.head_dim, pool_values.head_dim);
  v.require(
      max_context_len <= max_len, "max_context_len",
      "at most " + std::to_string(max_len) + " for heads of fewer than 2^31 elements",
      max_context_len);

  auto primitive = std::make_shared<GatherKV>(s, max_context_len);
  Arrays inputs{key_pool, value_pool, dense(block_tables, s), dense(context_lens, s)};
  auto shapes = primitive->output_shapes(inputs);
  auto out = mx::array::make_arrays(std::move(shapes), {*dtype, *dtype}, primitive, inputs);
  return {out[0], out[1]};
}

// Logits are multiplied by log2(e) before use and must stay finite.
constexpr float kLargestLogit = 2e38f;
const std::string kPositive = "positive and at most 2e+38";

// Range of a per-head option that keeps logits finite: a number outside of it, or a NaN, would turn
// all rows of its head into NaN.
struct PerHead {
  const char* name;
  float min;
  float max;
  const char* expectation;
};
constexpr PerHead kSinks{
    "sinks", -std::numeric_limits<float>::infinity(), kLargestLogit, "at most 2e+38, or -inf"};
constexpr PerHead kSlopes{"alibi_slopes", -1e28f, 1e28f, "from -1e+28 to 1e+28"};

template <typename T>
void require_numbers_of(
    const Validator& v, const PerHead& kind, const mx::array& a, int begin, int end) {
  for (int i = begin; i < end; i++) {
    float number = float(a.data<T>()[i * a.strides(0)]);
    v.require(
        number >= kind.min && number <= kind.max,
        std::string(kind.name) + "[" + std::to_string(i - begin) + "]", kind.expectation, number);
  }
}

void require_numbers(
    const Validator& v, const PerHead& kind, const mx::array& a, int begin, int end) {
  switch (a.dtype()) {
    case mx::float16:
      return require_numbers_of<mx::float16_t>(v, kind, a, begin, end);
    case mx::bfloat16:
      return require_numbers_of<mx::bfloat16_t>(v, kind, a, begin, end);
    case mx::float64:
      return require_numbers_of<double>(v, kind, a, begin, end);
    default:
      return require_numbers_of<float>(v, kind, a, begin, end);
  }
}

// A part of the input `per_head`.
mx::array checked_per_head(
    const Validator& v, const PerHead& kind, const mx::array& a, int num_q_heads, mx::Stream s) {
  v.shape(a, kind.name, {num_q_heads});
  v.require(mx::issubdtype(a.dtype(), mx::floating), kind.name, "floating point", a.dtype());
#ifndef MLX_PAGED_CUDA  // with CUDA, reading an array would migrate it away from the GPU
  if (is_on_host(a)) {
    require_numbers(v, kind, a, 0, num_q_heads);
  }
#endif
  return dense(mx::astype(a, mx::float32, s), s);
}

mx::array paged_attention(
    const mx::array& queries, const mx::array& key_pool, const mx::array& value_pool,
    const mx::array& positions, const mx::array& block_tables, const mx::array& work_items,
    const mx::array& merge_items, float scale, int window, float softcap,
    const std::optional<mx::array>& sinks, const std::optional<mx::array>& alibi_slopes,
    const std::string& activations, mx::StreamOrDevice s_) {
  auto s = mx::to_stream(s_);
  Validator v("paged_attention");
  auto rounding = activations_named(v, activations);
  v.pools(key_pool, value_pool, s);
  bool has_bounds = positions.ndim() == 2 && positions.shape(0) == 3;
  if (!has_bounds) {
    v.shape(positions, "positions", {-1});
  }
  v.shape(block_tables, "block_tables", {-1, -1});
  v.shape(work_items, "work_items", {-1, int(sizeof(paged::WorkItem) / sizeof(int32_t))});
  v.shape(merge_items, "merge_items", {-1, int(sizeof(paged::MergeItem) / sizeof(int32_t))});
  v.int32(positions, "positions");
  v.int32(block_tables, "block_tables");
  v.int32(work_items, "work_items");
  v.int32(merge_items, "merge_items");
  int key_dim = layout_of(key_pool).head_dim, value_dim = layout_of(value_pool).head_dim;
  v.shape(queries, "queries", {positions.shape(-1), -1, key_dim});
  if (format_of(key_pool.dtype()) == PoolFormat::plain) {
    v.same_dtype(queries, "queries", key_pool, "key_pool");
  } else {
    v.floating(queries, "queries");
  }
  int num_q_heads = queries.shape(1);
  int num_kv_heads = key_pool.shape(2);
  v.require(
      num_q_heads > 0 && num_q_heads % num_kv_heads == 0, "num_q_heads",
      "a multiple of num_kv_heads " + std::to_string(num_kv_heads), num_q_heads);
  v.require(scale > 0 && scale <= kLargestLogit, "scale", kPositive, scale);
  v.require(window >= 0, "window", "at least 1, or 0 for none", window);
  v.require(
      softcap >= 0 && softcap <= kLargestLogit, "softcap", kPositive + ", or 0 for none", softcap);

  Arrays inputs{
      dense(queries, s),
      key_pool,
      value_pool,
      dense(positions, s),
      dense(block_tables, s),
      dense(work_items, s),
      dense(merge_items, s)};
  Arrays per_head;
  if (sinks) {
    per_head.push_back(checked_per_head(v, kSinks, *sinks, num_q_heads, s));
  }
  if (alibi_slopes) {
    per_head.push_back(checked_per_head(v, kSlopes, *alibi_slopes, num_q_heads, s));
  }
  if (!per_head.empty()) {
    inputs.push_back(per_head.size() == 1 ? per_head[0] : mx::concatenate(per_head, s));
  }
  auto options =
      paged::attention_options(scale, window, softcap, sinks.has_value(), alibi_slopes.has_value());
  auto of_step = options;
  of_step.bounded_rows = has_bounds ? queries.shape(0) : 0;
  note_attention_layer(layer_of(queries, key_pool, value_pool, paged::features_of(of_step)));
  return mx::array(
      {queries.shape(0), num_q_heads, value_dim}, queries.dtype(),
      std::make_shared<PagedAttention>(s, options, rounding), std::move(inputs));
}

mx::array apply_token_bitmask(
    const mx::array& logits, const mx::array& bitmask, const mx::array& rows,
    mx::StreamOrDevice s_) {
  auto s = mx::to_stream(s_);
  Validator v("apply_token_bitmask");
  v.shape(logits, "logits", {-1, -1});
  v.floating(logits, "logits");
  v.require(logits.shape(1) > 0, "vocab_size", "at least 1", logits.shape(1));
  v.shape(rows, "rows", {-1});
  v.int32(rows, "rows");
  int num_masks = rows.shape(0);
  v.require(
      num_masks <= logits.shape(0), "the number of rows",
      "at most " + std::to_string(logits.shape(0)) + " (those of logits)", num_masks);
  v.shape(bitmask, "bitmask", {num_masks, (logits.shape(1) - 1) / 32 + 1});
  v.require(
      bitmask.dtype() == mx::int32 || bitmask.dtype() == mx::uint32, "bitmask", "int32 or uint32",
      bitmask.dtype());
  if (num_masks == 0) {
    return logits;
  }
  return mx::array(
      logits.shape(), logits.dtype(), std::make_shared<ApplyTokenBitmask>(s),
      {dense(logits, s), dense(bitmask, s), dense(rows, s)});
}

mx::array edit_logits(
    const mx::array& logits, const mx::array& rows, const mx::array& factors,
    const mx::array& entries, const mx::array& values, const mx::array& newest,
    mx::StreamOrDevice s_) {
  auto s = mx::to_stream(s_);
  Validator v("edit_logits");
  auto require_float32 = [&](const mx::array& a, const char* name) {
    v.require(a.dtype() == mx::float32, name, "float32", a.dtype());
  };
  v.shape(logits, "logits", {-1, -1});
  require_float32(logits, "logits");
  v.shape(rows, "rows", {-1, 5});
  v.int32(rows, "rows");
  v.shape(factors, "factors", {rows.shape(0), 3});
  require_float32(factors, "factors");
  v.shape(entries, "entries", {-1, 2});
  v.int32(entries, "entries");
  v.require(entries.shape(0) > 0, "the number of entries", "at least 1", entries.shape(0));
  v.shape(values, "values", {entries.shape(0)});
  require_float32(values, "values");
  v.shape(newest, "newest", {-1});
  v.int32(newest, "newest");
  v.require(newest.shape(0) > 0, "the number of newest tokens", "at least 1", newest.shape(0));
  if (rows.shape(0) == 0) {
    return logits;
  }
  return mx::array(
      logits.shape(), mx::float32, std::make_shared<EditLogits>(s),
      {dense(logits, s), dense(rows, s), dense(factors, s), dense(entries, s), dense(values, s),
       dense(newest, s)});
}

mx::array take_rows(const mx::array& a, const mx::array& ids, mx::StreamOrDevice s_) {
  auto s = mx::to_stream(s_);
  Validator v("take_rows");
  v.shape(a, "a", {-1, -1, -1});
  v.require(
      a.itemsize() == 4 || a.itemsize() == 2, "the dtype of a", "of 16 or 32 bits", a.dtype());
  v.shape(ids, "ids", {a.shape(0), -1});
  v.require(
      ids.dtype() == mx::int32 || ids.dtype() == mx::uint32, "ids", "int32 or uint32", ids.dtype());
  v.require(ids.size() == 0 || a.shape(1) > 0, "the number of rows", "at least 1", a.shape(1));
  uint64_t size = uint64_t(ids.size()) * a.shape(2);
  v.require(size < uint64_t(1) << 32, "the size of the result", "below 2^32", size);
  return mx::array(
      {ids.shape(0), ids.shape(1), a.shape(2)}, a.dtype(), std::make_shared<TakeRows>(s),
      {dense(a, s), dense(ids, s)});
}

// --- Ids and slots ---

template <typename... Parts>
void require_id(bool ok, const Parts&... parts) {
  if (!ok) {
    std::ostringstream message;
    (message << ... << parts);
    throw std::out_of_range(message.str());
  }
}

// Checks entries [begin, end) of a row of block_tables.
void require_blocks(
    const char* op, const mx::array& tables, int row, int begin, int end, int num_blocks) {
  int max_blocks = tables.shape(1);
  require_id(
      begin >= 0 && begin <= end && end <= max_blocks, "[", op, "] the blocks of row ", row,
      " must be in [0, ", max_blocks, "] but got [", begin, ", ", end, ")");
  const int32_t* table = tables.data<int32_t>() + int64_t(row) * max_blocks;
  for (int i = begin; i < end; i++) {
    require_id(
        table[i] >= 0 && table[i] < num_blocks, "[", op, "] block_tables[", row, ", ", i,
        "] must be in [0, ", num_blocks, ") but got ", table[i]);
  }
}

// Checks the rows of a work or merge item.
void require_rows(const char* items, int i, int begin, int end, int num_rows) {
  require_id(
      begin >= 0 && begin <= end && end <= num_rows, "[paged_attention] the rows of ", items, "[",
      i, "] must be in [0, ", num_rows, "] but got [", begin, ", ", end, ")");
}

}  // namespace

void KernelNode::check_ids(const Arrays& in) {
  if (check_enabled()) {
    mx::synchronize(stream());
    check(in);
  }
}

void WriteKV::check(const Arrays& in) const {
  const auto& pool = in[0];
  const int32_t* slots = in[4].data<int32_t>();
  int64_t num_slots = int64_t(pool.shape(0)) * pool.shape(1);
  std::set<int32_t> written;
  for (int i = 0; i < in[4].shape(0); i++) {
    require_id(
        slots[i] >= -1 && slots[i] < num_slots, "[write_kv] slot_mapping[", i,
        "] must be -1 or in [0, ", num_slots, ") but got ", slots[i]);
    require_id(
        slots[i] == -1 || written.insert(slots[i]).second, "[write_kv] slot_mapping[", i,
        "] must be unique but slot ", slots[i], " is written twice");
  }
}

void CopyBlocks::check(const Arrays& in) const {
  const int32_t* pairs = in.back().data<int32_t>();
  int count = in.back().shape(0);
  int num_blocks = in[0].shape(0);
  std::set<int32_t> destinations;
  for (int i = 0; i < 2 * count; i++) {
    require_id(
        pairs[i] >= 0 && pairs[i] < num_blocks, "[copy_blocks] block_pairs[", i / 2, ", ", i % 2,
        "] must be in [0, ", num_blocks, ") but got ", pairs[i]);
    require_id(
        i % 2 == 0 || destinations.insert(pairs[i]).second, "[copy_blocks] block_pairs[", i / 2,
        ", 1] must be unique but block ", pairs[i], " is a destination twice");
  }
  for (int i = 0; i < count; i++) {
    require_id(
        !destinations.count(pairs[2 * i]), "[copy_blocks] block_pairs[", i,
        ", 0] must not be a destination but block ", pairs[2 * i], " is");
  }
}

void GatherKV::check(const Arrays& in) const {
  const auto& pool = in[0];
  const auto& tables = in[2];
  const int32_t* context_lens = in[3].data<int32_t>();
  int block_size = pool.shape(1);
  int64_t room = int64_t(tables.shape(1)) * block_size;
  for (int i = 0; i < tables.shape(0); i++) {
    require_id(
        context_lens[i] >= 0 && context_lens[i] <= room, "[gather_kv] context_lens[", i,
        "] must be in [0, ", room, "] but got ", context_lens[i]);
    int used = (std::min(context_lens[i], max_context_len_) + block_size - 1) / block_size;
    require_blocks("gather_kv", tables, i, 0, used, pool.shape(0));
  }
}

void PagedAttention::check(const Arrays& in) const {
  int num_rows = in[kQueries].shape(0);
  int num_blocks = in[kKeyPool].shape(0);
  const auto& tables = in[kTables];
  const int32_t* positions = in[kPositions].data<int32_t>();
  for (int i = 0; in[kPositions].ndim() == 2 && i < num_rows; i++) {
    int first = positions[num_rows + i], last = positions[2 * num_rows + i];
    require_id(
        first >= 0 && first <= positions[i] && last >= positions[i],
        "[paged_attention] the bounds of row ", i, " must contain its position ", positions[i],
        " but are ", first, " and ", last);
  }
  const auto* work = reinterpret_cast<const paged::WorkItem*>(in[kWork].data<int32_t>());
  const auto* merges = reinterpret_cast<const paged::MergeItem*>(in[kMerge].data<int32_t>());
  int num_partials = 0;
  for (int i = 0; i < in[kWork].shape(0); i++) {
    const auto& item = work[i];
    require_rows("work_items", i, item.row_begin, item.row_end, num_rows);
    if (item.row_begin == item.row_end) {
      continue;
    }
    require_id(
        item.sequence >= 0 && item.sequence < tables.shape(0),
        "[paged_attention] the sequence of work_items[", i, "] must be in [0, ", tables.shape(0),
        ") but got ", item.sequence);
    require_blocks(
        "paged_attention", tables, item.sequence, item.first_block, item.last_block, num_blocks);
    num_partials = std::max(num_partials, item.partial_begin + item.row_end - item.row_begin);
  }
  for (int i = 0; i < in[kMerge].shape(0); i++) {
    const auto& item = merges[i];
    require_rows("merge_items", i, item.row_begin, item.row_end, num_rows);
    int64_t end = item.partial_begin + int64_t(item.num_splits) * (item.row_end - item.row_begin);
    require_id(
        item.partial_begin >= 0 && item.num_splits >= 0 && end <= num_partials,
        "[paged_attention] the partials of merge_items[", i, "] must be in [0, ", num_partials,
        "] but got [", item.partial_begin, ", ", end, ")");
  }
  Validator v("paged_attention");
  int num_q_heads = in[kQueries].shape(1);
  int begin = 0;
  if (options_.has_sinks) {
    require_numbers(v, kSinks, in[kPerHead], begin, begin + num_q_heads);
    begin += num_q_heads;
  }
  if (options_.has_alibi) {
    require_numbers(v, kSlopes, in[kPerHead], begin, begin + num_q_heads);
  }
}

void GreedyTokens::check(const Arrays&) const {}

void DrawTokens::check(const Arrays&) const {}

void SamplingThresholds::check(const Arrays&) const {}

void ApplyTokenBitmask::check(const Arrays& in) const {
  const int32_t* rows = in[2].data<int32_t>();
  int num_rows = in[0].shape(0);
  std::set<int32_t> masked;
  for (int i = 0; i < in[2].shape(0); i++) {
    require_id(
        rows[i] >= 0 && rows[i] < num_rows, "[apply_token_bitmask] rows[", i, "] must be in [0, ",
        num_rows, ") but got ", rows[i]);
    require_id(
        masked.insert(rows[i]).second, "[apply_token_bitmask] rows[", i,
        "] must be unique but row ", rows[i], " appears twice");
  }
}

void EditLogits::check(const Arrays& in) const {
  auto require_below = [](int64_t id, int64_t count, const char* what) {
    require_id(
        id >= 0 && id < count, "[edit_logits] ", what, " must be in [0, ", count, ") but got ", id);
  };
  const auto* rows = in[1].data<int32_t>();
  const auto* entries = in[3].data<int32_t>();
  const auto* newest = in[5].data<int32_t>();
  for (int i = 0; i < in[1].shape(0); i++, rows += 5) {
    require_below(rows[0], in[0].shape(0), "a row");
    for (int entry = rows[2]; entry < rows[4]; entry++) {
      require_below(entry, in[3].shape(0), "the index of an entry");
      require_below(entries[2 * entry], in[0].shape(1), "a token");
    }
    if (rows[1] >= 0) {
      require_below(rows[1], in[5].shape(0), "the index of a newest token");
      require_below(newest[rows[1]], in[0].shape(1), "a newest token");
    }
  }
}

void TakeRows::check(const Arrays& in) const {
  const auto* ids = in[1].data<uint32_t>();
  for (size_t i = 0; i < in[1].size(); i++) {
    require_id(
        ids[i] < uint32_t(in[0].shape(1)), "[take_rows] ids must be in [0, ", in[0].shape(1),
        ") but got ", int32_t(ids[i]));
  }
}

void bind_kernel_ops(nb::module_& m) {
  m.def(
      "write_kv", &write_kv, "key_pool"_a, "value_pool"_a, "keys"_a, "values"_a, "slot_mapping"_a,
      nb::kw_only(), "stream"_a = nb::none());
  m.def(
      "copy_blocks", &copy_blocks, "pools"_a, "block_pairs"_a, nb::kw_only(),
      "stream"_a = nb::none());
  m.def(
      "gather_kv", &gather_kv, "key_pool"_a, "value_pool"_a, "block_tables"_a, "context_lens"_a,
      "max_context_len"_a, nb::kw_only(), "dtype"_a = nb::none(), "stream"_a = nb::none());
  m.def(
      "paged_attention", &paged_attention, "queries"_a, "key_pool"_a, "value_pool"_a, "positions"_a,
      "block_tables"_a, "work_items"_a, "merge_items"_a, nb::kw_only(), "scale"_a, "window"_a = 0,
      "softcap"_a = 0.0f, "sinks"_a = nb::none(), "alibi_slopes"_a = nb::none(),
      "activations"_a = "float32", "stream"_a = nb::none());
  m.def(
      "apply_token_bitmask", &apply_token_bitmask, "logits"_a, "bitmask"_a, "rows"_a, nb::kw_only(),
      "stream"_a = nb::none());
  m.def(
      "edit_logits", &edit_logits, "logits"_a, "rows"_a, "factors"_a, "entries"_a, "values"_a,
      "newest"_a, nb::kw_only(), "stream"_a = nb::none());
  m.def("take_rows", &take_rows, "a"_a, "ids"_a, nb::kw_only(), "stream"_a = nb::none());
}

}  // namespace mlx_paged
