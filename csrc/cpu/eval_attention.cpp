// Copyright © 2026 the mlx_paged authors. Apache-2.0.

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <utility>
#include <vector>

#include "../primitives.h"
#include "dense.h"
#include "eval.h"
#include "kernels.h"
#include "mlx/allocator.h"
#include "mlx/backend/cpu/encoder.h"

namespace mlx_paged {

namespace {

// Grows to the largest task of the thread so far and stays: a step's layers need the same again.
float* thread_scratch(size_t num_floats) {
  struct Free {
    void operator()(float* p) const { std::free(p); }
  };
  thread_local std::unique_ptr<float, Free> buffer;
  thread_local size_t capacity = 0;
  if (num_floats > capacity) {
    constexpr size_t kAlignment = 64;
    size_t bytes = (num_floats * sizeof(float) + kAlignment - 1) / kAlignment * kAlignment;
    buffer.reset(static_cast<float*>(std::aligned_alloc(kAlignment, bytes)));
    if (!buffer) {
      capacity = 0;
      throw std::bad_alloc();
    }
    capacity = num_floats;
  }
  return buffer.get();
}

struct Counts {
  int num_rows, num_items, num_merges;
  size_t out_bytes;
};

// Into how many pieces the KV heads of an item are divided. Decode reads memory in order when a
// task has all heads, so it splits them only to keep the threads busy. Prefill computes more than
// it reads, and its state for many heads would not fit a core's cache.
int head_pieces(const cpu::AttentionArgs& args, int num_items, int max_rows) {
  constexpr int kPrefillRows = 4;
  constexpr int kTasksPerThread = 4;
  if (max_rows > kPrefillRows) {
    return args.num_kv_heads;
  }
  int wanted = (kTasksPerThread * cpu::num_threads() + num_items - 1) / std::max(num_items, 1);
  return std::clamp(wanted, 1, args.num_kv_heads);
}

void run(cpu::AttentionArgs args, Counts counts) {
  const auto& kernels = cpu::kernels().attention;
  auto item = [&](int i) { return args.work_items[i]; };
  auto merge = [&](int i) { return args.merge_items[i]; };

  int covered_rows = 0;
  int max_rows = 0;
  int64_t partial_rows = 0;
  for (int i = 0; i < counts.num_items; i++) {
    int rows = item(i).row_end - item(i).row_begin;
    max_rows = std::max(max_rows, rows);
    if (item(i).partial_begin < 0) {
      covered_rows += rows;
    } else {
      partial_rows = std::max<int64_t>(partial_rows, int64_t(item(i).partial_begin) + rows);
    }
  }
  std::vector<std::pair<int, int>> merge_rows;
  for (int i = 0; i < counts.num_merges; i++) {
    for (int row = merge(i).row_begin; row < merge(i).row_end; row++) {
      merge_rows.emplace_back(i, row);
    }
  }
  covered_rows += int(merge_rows.size());
  if (covered_rows < counts.num_rows) {
    std::memset(args.out, 0, counts.out_bytes);
  }

  auto workspace = [&](int64_t width) {
    return std::make_unique_for_overwrite<float[]>(partial_rows * args.num_q_heads * width);
  };
  auto partial_out = workspace(args.values.head_dim);
  auto partial_max = workspace(1);
  auto partial_sum = workspace(1);
  args.partial_out = partial_out.get();
  args.partial_max = partial_max.get();
  args.partial_sum = partial_sum.get();

  int pieces = head_pieces(args, counts.num_items, max_rows);
  int heads_each = (args.num_kv_heads + pieces - 1) / pieces;
  size_t scratch = kernels.scratch_size(args, max_rows, heads_each);
  cpu::parallel_for(counts.num_items * pieces, [&](int task, int) {
    int i = task / pieces;
    int head_begin = task % pieces * heads_each;
    int head_end = std::min(args.num_kv_heads, head_begin + heads_each);
    if (item(i).row_begin < item(i).row_end && head_begin < head_end) {
      kernels.attend(args, i, head_begin, head_end, thread_scratch(scratch));
    }
  });
  cpu::parallel_for(int(merge_rows.size()), [&](int task, int) {
    kernels.merge(args, merge_rows[task].first, merge_rows[task].second);
  });
}

}  // namespace

void PagedAttention::eval_cpu(const Arrays& inputs, Arrays& out) {
  auto& encoder = mx::cpu::get_command_encoder(stream());
  auto in = cpu::dense_inputs(inputs, kPositions, encoder);
  check_ids(in);
  auto queries = cpu::dense(in[kQueries], encoder);
  auto key_pool = cpu::dense_pool(in[kKeyPool], encoder);
  auto value_pool = cpu::dense_pool(in[kValuePool], encoder);
  const auto& tables = in[kTables];
  out[0].set_data(mx::allocator::malloc(out[0].nbytes()));

  cpu::AttentionArgs args{};
  args.dtype = dtype_of(queries.dtype());
  args.queries = queries.data<void>();
  args.keys = {layout_of(key_pool), key_pool.data<char>()};
  args.values = {layout_of(value_pool), value_pool.data<char>()};
  args.out = out[0].data<void>();
  args.positions = in[kPositions].data<int32_t>();
  args.num_rows = queries.shape(0);
  args.bounds = in[kPositions].ndim() == 2 ? args.positions + args.num_rows : nullptr;
  args.block_tables = tables.data<int32_t>();
  args.work_items = reinterpret_cast<const paged::WorkItem*>(in[kWork].data<int32_t>());
  args.merge_items = reinterpret_cast<const paged::MergeItem*>(in[kMerge].data<int32_t>());
  args.sinks = in.size() > kSinks ? in[kSinks].data<float>() : nullptr;
  args.num_q_heads = queries.shape(1);
  args.num_kv_heads = key_pool.shape(2);
  args.block_size = key_pool.shape(1);
  args.max_blocks = tables.shape(1);
  args.scale = options_.scale;
  args.softcap = options_.softcap;
  args.window = options_.window;
  Counts counts{queries.shape(0), in[kWork].shape(0), in[kMerge].shape(0), out[0].nbytes()};

  encoder.dispatch([args, counts] { run(args, counts); });
}

}  // namespace mlx_paged
