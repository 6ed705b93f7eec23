// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Selects the attention kernels of a plan. A step can mix decodes, drafts and prefill chunks: each
// kind of item present gets a launch over all items, and threadgroups with items of another kind
// return at once.

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "../metal/attention_shape.h"
#include "../metal/kernel_table.h"
#include "attention_plan.h"
#include "cuda/portable_shape.h"
#include "cuda/variants.h"
#include "host_copies.h"
#include "primitives.h"
#include "rejected_kernels.h"

namespace mlx_paged {

namespace {

using Inputs = PagedAttention;
using paged::MergeItem;
using paged::WorkItem;

// In the order of pool_options.h and attention_variant.h.
std::vector<uint8_t> function_constants(const AttentionLayer& layer) {
  std::vector<uint8_t> values{
      layer.key_format != PoolFormat::plain, layer.key_format == PoolFormat::int4,
      layer.value_format == PoolFormat::int4, layer.key_format == PoolFormat::fp8};
  values.resize(paged::FIRST_FEATURE);
  for (int i = 0; i < paged::NUM_FEATURES; i++) {
    values.push_back(layer.features >> i & 1);
  }
  return values;
}

// As num_written: all keys.
constexpr int kUnknown = 1 << 30;

struct Rows {
  int fewest = std::numeric_limits<int>::max();
  int max_rows = 0;
};

struct PlanSummary {
  std::map<AttentionVariant, Rows> variants;
  int num_partials = 0;
  int max_merge_rows = 0;
  int covered_rows = 0;  // rows that some item or merge writes
  int max_written = 0;   // see num_written in kernel_table.h
};

// The items of a plan and their owner: the host's copy if the plan has been sent to a GPU.
template <typename Item>
std::pair<std::shared_ptr<const std::byte>, const Item*> host_view(const mx::array& a) {
  auto copy = find_host_copy(a);
  const void* items = copy ? static_cast<const void*>(copy.get()) : a.data<int32_t>();
  return {std::move(copy), static_cast<const Item*>(items)};
}

// Limits of the kernels on a GPU.
struct Limits {
  int decode_queries;
  int matrix_rows;
  int prefill_rows;  // 0: no paged_prefill
  int tensor_rows;   // 0: no tensor_prefill
};

Limits limits_of(Gpu gpu, int key_dim, int item_size) {
  if (gpu == Gpu::nvidia) {
    return {
        paged::portable_decode_max_queries(key_dim), paged::portable_matrix_max_rows(key_dim),
        paged::portable_prefill_max_rows(key_dim), 0};
  }
  return {
      paged::decode_max_queries(key_dim), paged::matrix_max_rows(key_dim, item_size),
      paged::prefill_max_rows(key_dim, item_size),
      allows_tensor_kernels() ? paged::matmul_max_rows(key_dim, item_size) : 0};
}

int prefill_tokens(Gpu gpu, int key_dim, int value_dim, int item_size, int rows) {
  return gpu == Gpu::nvidia ? paged::portable_prefill_tokens(key_dim, value_dim, item_size)
                            : paged::prefill_tokens(key_dim, value_dim, item_size, rows);
}

int matrix_groups(Gpu gpu, int key_dim) {
  return gpu == Gpu::nvidia ? paged::portable_matrix_simd_groups(key_dim)
                            : paged::matrix_simd_groups(key_dim);
}

KernelName kernel_of(
    const AttentionVariant& variant, Gpu gpu, DType dtype, int key_dim, int value_dim) {
  switch (variant.kernel) {
    case AttentionKernel::decode:
      return attention_kernel(gpu, "paged_decode", dtype, key_dim, value_dim, "q", variant.queries);
    case AttentionKernel::decode_matrix:
      return attention_kernel(
          gpu, "paged_decode_matrix", dtype, key_dim, value_dim, "m", variant.queries);
    case AttentionKernel::prefill:
      return attention_kernel(
          gpu, "paged_prefill", dtype, key_dim, value_dim, "m", variant.queries);
    case AttentionKernel::tensor_prefill:
      return attention_kernel(
          gpu, "tensor_prefill", dtype, key_dim, value_dim, "m", variant.queries);
  }
  throw std::logic_error("[launch] unknown attention kernel");
}

// Dtype and sizes of a layer, which determine the kernels that can serve it.
struct LayerShape {
  Gpu gpu;
  DType dtype;
  int group;
  int key_dim;
  int value_dim;

  int item_size() const { return dtype == DType::float32 ? 4 : 2; }
};

bool is_allowed(const AttentionVariant& variant, const LayerShape& layer) {
  auto kernel = kernel_of(variant, layer.gpu, layer.dtype, layer.key_dim, layer.value_dim);
  return !is_rejected(kernel.host_name);
}

// Returns the best variant that calibration allows. The rows of each variant are contiguous, as the
// launches of a plan require. Sizes of a matrix that are too large only waste work, and those that
// are too small take several tiles. Empty: no kernel is left.
std::optional<AttentionVariant> allowed_variant(int query_rows, const LayerShape& layer) {
  Limits limits = limits_of(layer.gpu, layer.key_dim, layer.item_size());
  int queries = query_rows * layer.group;
  auto first_allowed = [&](std::vector<AttentionVariant> variants) {
    auto found = std::find_if(variants.begin(), variants.end(), [&](const auto& variant) {
      return is_allowed(variant, layer);
    });
    return found == variants.end() ? std::nullopt : std::optional(*found);
  };
  auto wanted =
      attention_variant(layer.gpu, query_rows, layer.group, layer.key_dim, layer.item_size());
  if (wanted.kernel == AttentionKernel::decode) {
    // Without one size, those above it are not used either.
    std::vector<AttentionVariant> below;
    for (int q = 1; q <= queries; q++) {
      below.push_back({AttentionKernel::decode, q});
    }
    if (std::all_of(below.begin(), below.end(), [&](const auto& variant) {
          return is_allowed(variant, layer);
        })) {
      return wanted;
    }
  }
  std::vector<AttentionVariant> prefills;
  for (auto [kernel, rows] :
       {std::pair(AttentionKernel::tensor_prefill, limits.tensor_rows),
        std::pair(AttentionKernel::prefill, limits.prefill_rows)}) {
    if (rows > 0) {
      bool is_small = queries <= 32;
      prefills.push_back({kernel, is_small ? 32 : rows});
      prefills.push_back({kernel, is_small ? rows : 32});
    }
  }
  if (wanted.kernel == AttentionKernel::prefill) {
    if (auto prefill = first_allowed(prefills)) {
      return prefill;
    }
  }
  int size = 8;
  while (size < std::min(queries, limits.matrix_rows)) {
    size *= 2;
  }
  std::vector<AttentionVariant> matrices;
  for (int larger = size; larger <= limits.matrix_rows; larger *= 2) {
    matrices.push_back({AttentionKernel::decode_matrix, larger});
  }
  for (int smaller = size / 2; smaller >= 8; smaller /= 2) {
    matrices.push_back({AttentionKernel::decode_matrix, smaller});
  }
  auto matrix = first_allowed(matrices);
  return matrix ? matrix : first_allowed(prefills);
}

PlanSummary read_plan(const Arrays& in, const LayerShape& layer) {
  PlanSummary plan;
  // A step has hundreds of items with few different numbers of rows, and a kernel is found by name.
  std::map<int, AttentionVariant> by_rows;
  auto variant_of = [&](int rows) {
    auto known = by_rows.find(rows);
    if (known == by_rows.end()) {
      auto variant = allowed_variant(rows, layer);
      if (!variant) {
        throw std::runtime_error(
            "[paged_attention] calibration rejected every kernel for this layer");
      }
      known = by_rows.emplace(rows, *variant).first;
    }
    return known->second;
  };
  auto [work_copy, work] = host_view<WorkItem>(in[Inputs::kWork]);
  for (int i = 0; i < in[Inputs::kWork].shape(0); i++) {
    int rows = work[i].row_end - work[i].row_begin;
    if (rows <= 0) {
      continue;
    }
    // Sequences before this one have at least one row each, unless it begins before their number.
    int written =
        work[i].row_begin < work[i].sequence ? kUnknown : work[i].row_end - work[i].sequence;
    plan.max_written = std::max(plan.max_written, written);
    auto& range = plan.variants[variant_of(rows)];
    range.fewest = std::min(range.fewest, rows);
    range.max_rows = std::max(range.max_rows, rows);
    if (work[i].partial_begin < 0) {
      plan.covered_rows += rows;
    } else {
      plan.num_partials = std::max(plan.num_partials, work[i].partial_begin + rows);
    }
  }
  auto [merge_copy, merge] = host_view<MergeItem>(in[Inputs::kMerge]);
  for (int i = 0; i < in[Inputs::kMerge].shape(0); i++) {
    int rows = merge[i].row_end - merge[i].row_begin;
    plan.covered_rows += std::max(rows, 0);
    plan.max_merge_rows = std::max(plan.max_merge_rows, rows);
  }
  return plan;
}

// Caches what was read from a plan, because all layers of a step share it. Compares the plan's
// numbers: its buffer may have been donated and overwritten.
class PlanCache {
 public:
  PlanSummary get(const Arrays& in, const LayerShape& layer) {
    Key key{int(layer.gpu), int(layer.dtype), layer.group,
            layer.key_dim,  layer.value_dim,  rejection_count()};
    auto [work_copy, work] = host_view<WorkItem>(in[Inputs::kWork]);
    auto [merge_copy, merge] = host_view<MergeItem>(in[Inputs::kMerge]);
    size_t work_bytes = in[Inputs::kWork].nbytes(), merge_bytes = in[Inputs::kMerge].nbytes();
    auto same = [](const std::vector<std::byte>& kept, const void* items, size_t bytes) {
      return kept.size() == bytes && (!bytes || !std::memcmp(kept.data(), items, bytes));
    };
    std::lock_guard lock(mutex_);
    for (const auto& entry : entries_) {
      if (entry.key == key && same(entry.work, work, work_bytes) &&
          same(entry.merge, merge, merge_bytes)) {
        return entry.plan;
      }
    }
    auto bytes_at = [](const void* items, size_t bytes) {
      auto* begin = static_cast<const std::byte*>(items);
      return std::vector<std::byte>(begin, begin + bytes);
    };
    auto& entry = entries_[next_++ % entries_.size()];
    entry = {key, bytes_at(work, work_bytes), bytes_at(merge, merge_bytes), read_plan(in, layer)};
    return entry.plan;
  }

 private:
  using Key = std::array<int, 6>;
  struct Entry {
    Key key;
    std::vector<std::byte> work;
    std::vector<std::byte> merge;
    PlanSummary plan;
  };
  std::mutex mutex_;
  std::array<Entry, 8> entries_;  // a model's kinds of layers, and steps in flight
  size_t next_ = 0;
};

PlanSummary summarize(const Arrays& in, const LayerShape& layer) {
  static PlanCache cache;
  return cache.get(in, layer);
}

}  // namespace

AttentionVariant attention_variant(Gpu gpu, int query_rows, int group, int key_dim, int item_size) {
  Limits limits = limits_of(gpu, key_dim, item_size);
  int queries = query_rows * group;
  if (queries <= limits.decode_queries) {
    return {AttentionKernel::decode, queries};
  }
  if (query_rows > kMaxDraftRows && limits.prefill_rows > 0) {
    return {AttentionKernel::prefill, queries <= 32 ? 32 : limits.prefill_rows};
  }
  int rows = 8;
  while (rows < std::min(queries, limits.matrix_rows)) {
    rows *= 2;
  }
  return {AttentionKernel::decode_matrix, rows};
}

AttentionLayer layer_of(
    const mx::array& queries, const mx::array& key_pool, const mx::array& value_pool,
    int features) {
  return {
      dtype_of(queries.dtype()),
      queries.shape(1) / key_pool.shape(2),
      layout_of(key_pool).head_dim,
      layout_of(value_pool).head_dim,
      features,
      format_of(key_pool.dtype()),
      format_of(value_pool.dtype())};
}

std::string attention_kernel_for(Gpu gpu, const AttentionLayer& layer, int query_rows) {
  if (!has_kernels(layer.key_dim, layer.value_dim)) {
    return "";
  }
  LayerShape shape{gpu, layer.dtype, layer.group, layer.key_dim, layer.value_dim};
  auto variant = allowed_variant(query_rows, shape);
  bool merges = !is_rejected(merge_kernel(layer.dtype, layer.value_dim).host_name);
  return variant && merges
             ? kernel_of(*variant, gpu, layer.dtype, layer.key_dim, layer.value_dim).host_name
             : "";
}

int max_shared_rows(Gpu gpu, const AttentionLayer& layer, int block_size) {
  // On Apple GPUs, kernels of one row and of several sum in different orders.
  return gpu == Gpu::nvidia ? cuda::max_shared_rows(layer, block_size) : 1;
}

std::vector<Pipeline> attention_pipelines(Gpu gpu, const AttentionLayer& layer) {
  if (!has_kernels(layer.key_dim, layer.value_dim)) {
    return {};
  }
  LayerShape shape{gpu, layer.dtype, layer.group, layer.key_dim, layer.value_dim};
  Limits limits = limits_of(gpu, layer.key_dim, shape.item_size());
  std::set<AttentionVariant> variants;
  int max_rows = std::max(limits.matrix_rows, limits.prefill_rows) + kMaxDraftRows;
  for (int rows = 1; rows <= max_rows; rows++) {  // beyond it tiles have the largest size
    if (auto variant = allowed_variant(rows, shape)) {
      variants.insert(*variant);
    }
  }
  std::vector<uint8_t> constants = function_constants(layer);
  std::vector<Pipeline> pipelines;
  for (const auto& variant : variants) {
    pipelines.push_back(
        {kernel_of(variant, gpu, layer.dtype, layer.key_dim, layer.value_dim), constants});
  }
  pipelines.push_back({merge_kernel(layer.dtype, layer.value_dim), constants});
  if (layer.key_format != PoolFormat::plain) {
    int key_dim = layer.key_dim, value_dim = layer.value_dim;
    std::pair<const char*, int> kernels[] = {
        {"quantize_kv", std::max(key_dim, value_dim)},
        {"gather_quantized", key_dim},
        {"gather_quantized", value_dim},
        {"rotate_queries", key_dim}};
    for (auto [function, dims] : kernels) {
      Pipeline pipeline{quantized_kernel(function, layer.dtype, dims), {}};
      if (std::find(pipelines.begin(), pipelines.end(), pipeline) == pipelines.end()) {
        pipelines.push_back(std::move(pipeline));
      }
    }
  }
  return pipelines;
}

namespace {

struct NotedLayers {
  std::mutex mutex;
  std::vector<AttentionLayer> layers;  // a few at most
};

NotedLayers& noted() {
  static NotedLayers layers;
  return layers;
}

}  // namespace

void note_attention_layer(const AttentionLayer& layer) {
  auto& [mutex, layers] = noted();
  std::lock_guard lock(mutex);
  if (std::find(layers.begin(), layers.end(), layer) == layers.end()) {
    layers.push_back(layer);
  }
}

std::vector<AttentionLayer> attention_layers() {
  auto& [mutex, layers] = noted();
  std::lock_guard lock(mutex);
  return layers;
}

void forget_attention_layers() {
  auto& [mutex, layers] = noted();
  std::lock_guard lock(mutex);
  layers.clear();
}

std::vector<Pipeline> pipelines_to_come(Gpu gpu) {
  std::vector<Pipeline> pipelines;
  for (const auto& kernel : kernel_names()) {
    if (kernel.file == "data.h" || kernel.file == "greedy.h" || kernel.file == "draw.h" ||
        kernel.file == "thresholds.h") {
      pipelines.push_back({kernel, {}});
    }
  }
  for (const auto& product : allowed_products()) {
    Pipeline pipeline{kernel_named(product.host_name), {}};
    if (std::find(pipelines.begin(), pipelines.end(), pipeline) == pipelines.end()) {
      pipelines.push_back(std::move(pipeline));
    }
  }
  auto& [mutex, layers] = noted();
  std::lock_guard lock(mutex);
  for (const auto& layer : layers) {
    for (auto& pipeline : attention_pipelines(gpu, layer)) {
      if (std::find(pipelines.begin(), pipelines.end(), pipeline) == pipelines.end()) {
        pipelines.push_back(std::move(pipeline));
      }
    }
  }
  return pipelines;
}

namespace {

// Sets the threads and the threadgroup memory of an attention launch.
void size_threadgroup(
    Launch& launch, const AttentionVariant& variant, Gpu gpu, int key_dim, int value_dim,
    int item_size) {
  int simd_groups = 0;
  switch (variant.kernel) {
    case AttentionKernel::decode:
      launch.threadgroup_memory = paged::decode_scratch(value_dim);
      simd_groups = paged::DECODE_SIMD_GROUPS;
      break;
    case AttentionKernel::decode_matrix:
      simd_groups = matrix_groups(gpu, key_dim);
      launch.threadgroup_memory =
          paged::matrix_scratch(key_dim, value_dim, item_size, variant.queries, simd_groups).size;
      break;
    case AttentionKernel::prefill:
      launch.threadgroup_memory = paged::prefill_scratch(
          key_dim, value_dim, item_size,
          prefill_tokens(gpu, key_dim, value_dim, item_size, variant.queries));
      simd_groups = paged::PREFILL_SIMD_GROUPS;
      break;
    case AttentionKernel::tensor_prefill:
      launch.threadgroup_memory =
          paged::matmul_scratch(key_dim, value_dim, item_size, variant.queries).size;
      simd_groups = variant.queries / paged::MATMUL_ROWS;
      break;
  }
  launch.threadgroup = {32 * uint32_t(simd_groups), 1, 1};
}

Launch fill_zero_launch(int operand, uint64_t num_bytes) {
  paged::FillParams params{int(num_bytes / 16)};
  Launch launch;
  launch.kernel = kernel_named("fill_zero");
  launch.buffers = {{operand, Access::write, num_bytes}};
  launch.constants = bytes_of(params);
  launch.grid = {uint32_t(params.num_chunks + 255) / 256, 1, 1};
  launch.threadgroup = {256, 1, 1};
  return launch;
}

}  // namespace

LaunchList PagedAttention::launches(const Arrays& in, const Arrays& out, Gpu gpu) const {
  const auto& queries = in[kQueries];
  const auto& keys = in[kKeyPool];
  auto dtype = dtype_of(queries.dtype());
  int key_dim = layout_of(keys).head_dim;
  int value_dim = layout_of(in[kValuePool]).head_dim;
  int item_size = int(queries.itemsize());
  int num_q_heads = queries.shape(1);
  int num_kv_heads = keys.shape(2);
  int num_items = in[kWork].shape(0);
  int num_merges = in[kMerge].shape(0);
  int output = int(in.size());
  int workspace = output + 1;
  LaunchList list;
  if (out[0].size() == 0) {
    return list;
  }
  PlanSummary plan = summarize(in, {gpu, dtype, num_q_heads / num_kv_heads, key_dim, value_dim});

  if (plan.covered_rows < queries.shape(0)) {
    list.launches.push_back(fill_zero_launch(output, out[0].nbytes()));
  }

  uint64_t partial_bytes = uint64_t(plan.num_partials) * num_q_heads * (value_dim + 2) * 4;
  list.workspaces = {std::max<uint64_t>(partial_bytes, 16)};
  auto read = [&](int operand) { return Binding{operand, Access::read, in[operand].nbytes()}; };
  // Kernels that need no per-head numbers do not read them, but the argument must still be a
  // buffer.
  Binding per_head = read(in.size() > kPerHead ? int(kPerHead) : int(kPositions));

  AttentionOptions options = options_;
  options.bounded_rows = in[kPositions].ndim() == 2 ? in[kPositions].shape(1) : 0;
  std::vector<uint8_t> constants = function_constants(
      {dtype, num_q_heads / num_kv_heads, key_dim, value_dim, paged::features_of(options),
       format_of(keys.dtype()), format_of(in[kValuePool].dtype())});
  Binding queries_read = read(kQueries);
  if (rotates_keys(format_of(keys.dtype()))) {
    int rotated = workspace + 1;
    list.workspaces.push_back(queries.nbytes());
    list.launches.push_back(rotate_queries_launch(queries, kQueries, rotated));
    queries_read = {rotated, Access::read, queries.nbytes()};
  }
  for (const auto& [variant, rows] : plan.variants) {
    paged::AttentionParams params{};
    params.num_q_heads = num_q_heads;
    params.num_kv_heads = num_kv_heads;
    params.block_shift = std::countr_zero(unsigned(keys.shape(1)));
    params.max_blocks = in[kTables].shape(1);
    params.num_partials = plan.num_partials;
    params.min_rows = rows.fewest;
    params.max_rows = rows.max_rows;
    params.options = options;
    params.key_format = int(format_of(keys.dtype()));
    params.value_format = int(format_of(in[kValuePool].dtype()));
    // Rounded up, so that captured launches stay valid while the number of drafts changes.
    params.num_written =
        plan.max_written > kUnknown / 2 ? kUnknown : int(std::bit_ceil(unsigned(plan.max_written)));

    Launch launch;
    launch.buffers.push_back(queries_read);
    for (int operand : {kKeyPool, kValuePool, kPositions, kTables, kWork}) {
      launch.buffers.push_back(read(operand));
    }
    launch.buffers.push_back(per_head);
    launch.buffers.push_back({output, Access::write, out[0].nbytes()});
    launch.buffers.push_back({workspace, Access::write, list.workspaces[0]});
    launch.constants = bytes_of(params);
    int tiles = paged::ceil_div(rows.max_rows * (num_q_heads / num_kv_heads), variant.queries);
    launch.grid = {uint32_t(num_items), uint32_t(num_kv_heads), uint32_t(tiles)};
    launch.kernel = kernel_of(variant, gpu, dtype, key_dim, value_dim);
    launch.function_constants = constants;
    size_threadgroup(launch, variant, gpu, key_dim, value_dim, item_size);
    // Each kind of item has its own rows of the output and of the workspace.
    launch.beside_previous = variant != plan.variants.begin()->first;
    list.launches.push_back(launch);
  }

  if (plan.max_merge_rows > 0) {
    paged::MergeParams params{num_q_heads, plan.num_partials, options};
    Launch launch;
    launch.kernel = merge_kernel(dtype, value_dim);
    launch.function_constants = constants;
    launch.buffers = {
        read(kMerge),
        {workspace, Access::read, list.workspaces[0]},
        per_head,
        {output, Access::write, out[0].nbytes()}};
    launch.constants = bytes_of(params);
    launch.grid = {
        uint32_t(num_merges), uint32_t(paged::ceil_div(num_q_heads, paged::MERGE_SIMD_GROUPS)),
        uint32_t(plan.max_merge_rows)};
    launch.threadgroup = {32 * paged::MERGE_SIMD_GROUPS, 1, 1};
    list.launches.push_back(launch);
  }
  return list;
}

}  // namespace mlx_paged
