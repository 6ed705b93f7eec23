// Copyright © 2026 the mlx_paged authors. Apache-2.0.

#include "attention_run.h"

#include <algorithm>
#include <cstring>

#include "../allocation.h"
#include "kernels.h"
#include "parallel_for.h"
#include "scratch.h"

namespace mlx_paged::cpu {

float* thread_scratch(size_t num_floats) {
  thread_local Scratch scratch;
  return scratch.at_least<float>(num_floats);
}

namespace {

// Number of pieces that an item's KV heads are divided into. Decode reads memory in order when a
// task has all heads, so it divides them only to keep the threads busy. Prefill is compute-bound,
// and the state of many heads would not fit a core's cache.
int head_pieces(const AttentionArgs& args, int num_items, int max_rows) {
  constexpr int kPrefillRows = 4;
  constexpr int kTasksPerThread = 4;
  if (max_rows > kPrefillRows) {
    return args.num_kv_heads;
  }
  int wanted = (kTasksPerThread * num_threads() + num_items - 1) / std::max(num_items, 1);
  return std::clamp(wanted, 1, args.num_kv_heads);
}

}  // namespace

AttentionRun::AttentionRun(const AttentionArgs& args, int num_items, int num_merges)
    : args_(args), kernels_(attention_kernels(args)), num_items_(num_items) {
  int covered_rows = 0;
  for (int i = 0; i < num_items; i++) {
    const auto& item = args.work_items[i];
    int rows = item.row_end - item.row_begin;
    max_rows_ = std::max(max_rows_, rows);
    if (item.partial_begin < 0) {
      covered_rows += rows;
    } else {
      partial_rows_ = std::max<int64_t>(partial_rows_, int64_t(item.partial_begin) + rows);
    }
  }
  for (int i = 0; i < num_merges; i++) {
    const auto& item = args.merge_items[i];
    for (int row = item.row_begin; row < item.row_end; row++) {
      merge_rows_.emplace_back(i, row);
    }
  }
  if (covered_rows + int(merge_rows_.size()) < args.num_rows) {
    find_empty_rows(num_merges);
  }
  pieces_ = head_pieces(args, num_items, max_rows_);
  heads_each_ = (args.num_kv_heads + pieces_ - 1) / pieces_;
  scratch_ = kernels_.scratch_size(args, max_rows_, heads_each_);
}

int64_t AttentionRun::num_partial_floats() const {
  return partial_rows_ * args_.num_q_heads * (args_.values.head_dim + 2);
}

void AttentionRun::find_empty_rows(int num_merges) {
  std::vector<bool> has_work(args_.num_rows);
  auto mark = [&](int begin, int end) {
    std::fill(has_work.begin() + begin, has_work.begin() + end, true);
  };
  for (int i = 0; i < num_items_; i++) {
    mark(args_.work_items[i].row_begin, args_.work_items[i].row_end);
  }
  for (int i = 0; i < num_merges; i++) {
    mark(args_.merge_items[i].row_begin, args_.merge_items[i].row_end);
  }
  for (int row = 0; row < args_.num_rows; row++) {
    if (!has_work[row]) {
      empty_rows_.push_back(row);
    }
  }
}

void AttentionRun::set_partials(float* partials) {
  int64_t rows = partial_rows_ * args_.num_q_heads;
  args_.partial_out = partials;
  args_.partial_max = partials + rows * args_.values.head_dim;
  args_.partial_sum = args_.partial_max + rows;
}

void AttentionRun::attend(int task) const {
  if (task == 0) {
    int64_t bytes = int64_t(args_.num_q_heads) * args_.values.head_dim *
                    (args_.dtype == DType::float32 ? sizeof(float) : sizeof(uint16_t));
    for (int row : empty_rows_) {
      std::memset(static_cast<char*>(args_.out) + row * bytes, 0, bytes);
    }
  }
  int i = task / pieces_;
  if (i >= num_items_) {
    return;
  }
  int head_begin = task % pieces_ * heads_each_;
  int head_end = std::min(args_.num_kv_heads, head_begin + heads_each_);
  if (args_.work_items[i].row_begin < args_.work_items[i].row_end && head_begin < head_end) {
    kernels_.attend(args_, i, head_begin, head_end, thread_scratch(scratch_));
  }
}

void AttentionRun::merge(int task) const {
  kernels_.merge(args_, merge_rows_[task].first, merge_rows_[task].second);
}

}  // namespace mlx_paged::cpu
