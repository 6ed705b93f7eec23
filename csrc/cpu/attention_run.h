// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Attention as two phases of tasks: every `attend`, then every `merge`. Tasks of a phase can run in
// any order.

#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "attention.h"

namespace mlx_paged::cpu {

class AttentionRun {
 public:
  // Reads the arrays of `args` from now on, except queries and pools, which attend() reads.
  AttentionRun(const AttentionArgs& args, int num_items, int num_merges);

  // Floats of workspace that set_partials() needs.
  int64_t num_partial_floats() const;
  void set_partials(float* partials);

  int num_tasks() const { return std::max(num_items_ * pieces_, int(!empty_rows_.empty())); }
  void attend(int task) const;
  int num_merges() const { return int(merge_rows_.size()); }
  void merge(int task) const;

 private:
  void find_empty_rows(int num_merges);

  AttentionArgs args_;
  const AttentionKernels& kernels_;
  int num_items_;
  int max_rows_ = 0;
  int64_t partial_rows_ = 0;
  std::vector<std::pair<int, int>> merge_rows_;  // merge item, row
  std::vector<int> empty_rows_;                  // rows without work items, set to zero
  int pieces_ = 1;                               // pieces per item, which divide its KV heads
  int heads_each_ = 0;
  size_t scratch_ = 0;
};

}  // namespace mlx_paged::cpu
