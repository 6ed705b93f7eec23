// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Products of rows with the matrices of their experts. Rows of one expert are multiplied together,
// so its weights are read once, in the checkpoint's format. Each element is summed in the same
// order for any other rows of its expert.

#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "product.h"

namespace mlx_paged::cpu {

// Matrices [n, k] of all experts, stacked.
struct ExpertWeights {
  WeightView all;                 // [num_experts * n, k]
  const float* bias = nullptr;    // [num_experts, n] or null
  const float* scales = nullptr;  // [num_experts] or null: factors of the products
  int num_experts = 0;

  int n() const { return num_experts ? all.n / num_experts : 0; }
};

// Arguments of expert products. A pair is a token and one of its experts.
struct ExpertArgs {
  const float* x = nullptr;
  int64_t x_row_stride = 0;   // between tokens
  int64_t x_pair_stride = 0;  // between the pairs of a token; 0: they share the row
  const uint32_t* indices = nullptr;
  int64_t index_row_stride = 0;
  int num_rows = 0;  // tokens
  int per_row = 0;   // experts per token
  ExpertWeights weights;
  // Second weight of a gated layer: out = silu(x @ weights.T + bias) * (x @ up.T + up.bias).
  std::optional<ExpertWeights> up;
  float* out = nullptr;  // [num_rows, per_row, n]; NaN for invalid experts

  int num_pairs() const { return num_rows * per_row; }
};

// Pairs sorted by expert.
class ExpertGroups {
 public:
  void assign(const ExpertArgs& args);

  struct Group {
    int expert;
    int begin, end;  // range in pairs()
  };
  const std::vector<Group>& groups() const { return groups_; }
  const std::vector<int>& pairs() const { return pairs_; }
  const std::vector<int>& without() const { return without_; }  // pairs with an invalid expert

 private:
  std::vector<int> starts_;
  std::vector<int> pairs_;
  std::vector<int> without_;
  std::vector<Group> groups_;
};

// Number of shares worth running in parallel.
int expert_shares(const ExpertArgs& args);

// Runs one of `num_shares` shares of about equal work. `groups` must match `args`.
void run_experts(const ExpertArgs& args, const ExpertGroups& groups, int share, int num_shares);

// The same, finding the groups in each share: for few pairs that costs less than a separate
// single-threaded phase.
void run_experts(const ExpertArgs& args, int share, int num_shares);

}  // namespace mlx_paged::cpu
