// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Which attention kernels a plan needs. A step may mix decodes, drafts to verify and prefill
// chunks: every kind of item present gets a launch over all items, and a threadgroup whose item is
// of another kind returns at once.

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "../metal/attention_shape.h"
#include "../metal/kernel_table.h"
#include "host_copies.h"
#include "primitives.h"

namespace mlx_paged {

namespace {

constexpr float kLog2e = 1.44269504088896340736f;
constexpr int kMostVectorQueries = 3;
constexpr int kMostDraftRows = 8;
constexpr int kWideHead = 257;         // from this key dim on, a matrix has at most 32 rows
constexpr int kWidePrefillHead = 129;  // likewise in paged_prefill

using Inputs = PagedAttention;
using paged::MergeItem;
using paged::WorkItem;

struct Rows {
  int fewest = std::numeric_limits<int>::max();
  int most = 0;
};

struct PlanSummary {
  std::map<AttentionVariant, Rows> variants;
  int num_partials = 0;
  int most_merge_rows = 0;
  int covered_rows = 0;  // that some item or merge writes
};

// The items of a plan, and what keeps them alive: the host's copy where it has sent them to a GPU.
template <typename Item>
std::pair<std::shared_ptr<const std::byte>, const Item*> host_view(const mx::array& a) {
  auto copy = find_host_copy(a);
  const void* items = copy ? static_cast<const void*>(copy.get()) : a.data<int32_t>();
  return {std::move(copy), static_cast<const Item*>(items)};
}

PlanSummary read_plan(const Arrays& in) {
  PlanSummary plan;
  int heads = in[Inputs::kQueries].shape(1) / in[Inputs::kKeyPool].shape(2);
  auto [work_copy, work] = host_view<WorkItem>(in[Inputs::kWork]);
  for (int i = 0; i < in[Inputs::kWork].shape(0); i++) {
    int rows = work[i].row_end - work[i].row_begin;
    if (rows <= 0) {
      continue;
    }
    auto& range = plan.variants[attention_variant(rows, heads, in[Inputs::kKeyPool].shape(3))];
    range.fewest = std::min(range.fewest, rows);
    range.most = std::max(range.most, rows);
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
    plan.most_merge_rows = std::max(plan.most_merge_rows, rows);
  }
  return plan;
}

// All layers of a step share a plan, so what was read of it is kept. A plan is known by its
// numbers: its buffer may have others by now, where MLX let an operation write to it (donation).
class PlanCache {
 public:
  PlanSummary get(const Arrays& in) {
    std::array<int, 2> key{
        in[Inputs::kQueries].shape(1) / in[Inputs::kKeyPool].shape(2),
        in[Inputs::kKeyPool].shape(3)};
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
    entry = {key, bytes_at(work, work_bytes), bytes_at(merge, merge_bytes), read_plan(in)};
    return entry.plan;
  }

 private:
  struct Entry {
    std::array<int, 2> key;
    std::vector<std::byte> work;
    std::vector<std::byte> merge;
    PlanSummary plan;
  };
  std::mutex mutex_;
  std::array<Entry, 8> entries_;  // kinds of layers of a model, and steps under way
  size_t next_ = 0;
};

PlanSummary summarize(const Arrays& in) {
  static PlanCache cache;
  return cache.get(in);
}

}  // namespace

AttentionVariant attention_variant(int query_rows, int group, int key_dim) {
  int queries = query_rows * group;
  if (queries <= kMostVectorQueries) {
    return {AttentionKernel::decode, queries};
  }
  if (query_rows > kMostDraftRows && key_dim < kWideHead) {
    return {AttentionKernel::prefill, queries <= 32 || key_dim >= kWidePrefillHead ? 32 : 64};
  }
  int rows = 8;
  while (rows < std::min(queries, key_dim < kWideHead ? 64 : 32)) {
    rows *= 2;
  }
  return {AttentionKernel::decode_matrix, rows};
}

LaunchList PagedAttention::launches(const Arrays& in, const Arrays& out) const {
  const auto& queries = in[kQueries];
  const auto& keys = in[kKeyPool];
  auto dtype = dtype_of(queries.dtype());
  int key_dim = keys.shape(3);
  int value_dim = in[kValuePool].shape(3);
  int item_size = int(queries.itemsize());
  int num_q_heads = queries.shape(1);
  int num_kv_heads = keys.shape(2);
  int num_items = in[kWork].shape(0);
  int num_merges = in[kMerge].shape(0);
  bool has_sinks = in.size() > kSinks;
  int output = int(in.size());
  int workspace = output + 1;
  LaunchList list;
  if (out[0].size() == 0) {
    return list;
  }
  PlanSummary plan = summarize(in);

  if (plan.covered_rows < queries.shape(0)) {
    paged::FillParams params{int(out[0].nbytes() / 16)};
    Launch launch;
    launch.kernel = kernel_named("fill_zero");
    launch.buffers = {{output, Access::write, out[0].nbytes()}};
    launch.constants = bytes_of(params);
    launch.grid = {uint32_t(params.num_chunks + 255) / 256, 1, 1};
    launch.threadgroup = {256, 1, 1};
    list.launches.push_back(launch);
  }

  uint64_t partial_bytes = uint64_t(plan.num_partials) * num_q_heads * (value_dim + 2) * 4;
  list.workspaces = {std::max<uint64_t>(partial_bytes, 16)};
  auto read = [&](int operand) { return Binding{operand, Access::read, in[operand].nbytes()}; };
  // A kernel without sinks does not read them, but its argument must still be a buffer.
  Binding sinks = read(has_sinks ? int(kSinks) : int(kPositions));

  for (const auto& [variant, rows] : plan.variants) {
    paged::AttentionParams params{};
    params.num_q_heads = num_q_heads;
    params.num_kv_heads = num_kv_heads;
    params.block_shift = std::countr_zero(unsigned(keys.shape(1)));
    params.max_blocks = in[kTables].shape(1);
    params.num_partials = plan.num_partials;
    params.min_rows = rows.fewest;
    params.max_rows = rows.most;
    params.window = options_.window ? options_.window : std::numeric_limits<int>::max();
    params.has_sinks = has_sinks;
    params.softcap = options_.softcap;
    params.scale = options_.softcap ? options_.scale : options_.scale * kLog2e;

    Launch launch;
    for (int operand : {kQueries, kKeyPool, kValuePool, kPositions, kTables, kWork}) {
      launch.buffers.push_back(read(operand));
    }
    launch.buffers.push_back(sinks);
    launch.buffers.push_back({output, Access::write, out[0].nbytes()});
    launch.buffers.push_back({workspace, Access::write, list.workspaces[0]});
    launch.constants = bytes_of(params);
    int tiles = paged::ceil_div(rows.most * (num_q_heads / num_kv_heads), variant.queries);
    launch.grid = {uint32_t(num_items), uint32_t(num_kv_heads), uint32_t(tiles)};
    int simd_groups = 0;
    switch (variant.kernel) {
      case AttentionKernel::decode:
        launch.kernel =
            attention_kernel("paged_decode", dtype, key_dim, value_dim, "q", variant.queries);
        launch.threadgroup_memory = paged::decode_scratch(value_dim);
        simd_groups = paged::DECODE_SIMD_GROUPS;
        break;
      case AttentionKernel::decode_matrix:
        launch.kernel = attention_kernel(
            "paged_decode_matrix", dtype, key_dim, value_dim, "m", variant.queries);
        launch.threadgroup_memory =
            paged::matrix_scratch(key_dim, value_dim, item_size, variant.queries).size;
        simd_groups = paged::matrix_simd_groups(key_dim);
        break;
      case AttentionKernel::prefill:
        launch.kernel =
            attention_kernel("paged_prefill", dtype, key_dim, value_dim, "m", variant.queries);
        launch.threadgroup_memory = paged::prefill_scratch(key_dim, value_dim, item_size);
        simd_groups = paged::PREFILL_SIMD_GROUPS;
        break;
    }
    launch.threadgroup = {32 * uint32_t(simd_groups), 1, 1};
    list.launches.push_back(launch);
  }

  if (plan.most_merge_rows > 0) {
    paged::MergeParams params{num_q_heads, plan.num_partials, has_sinks};
    Launch launch;
    launch.kernel = merge_kernel(dtype, value_dim);
    launch.buffers = {
        read(kMerge),
        {workspace, Access::read, list.workspaces[0]},
        sinks,
        {output, Access::write, out[0].nbytes()}};
    launch.constants = bytes_of(params);
    launch.grid = {
        uint32_t(num_merges), uint32_t(paged::ceil_div(num_q_heads, paged::MERGE_SIMD_GROUPS)),
        uint32_t(plan.most_merge_rows)};
    launch.threadgroup = {32 * paged::MERGE_SIMD_GROUPS, 1, 1};
    list.launches.push_back(launch);
  }
  return list;
}

}  // namespace mlx_paged
