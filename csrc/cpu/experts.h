// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Products of rows with the matrices of their experts. The rows of one expert are multiplied
// together, so that its weights are read once, as the checkpoint has them. Each element is summed
// in the same order whatever rows its expert has besides.

#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "product.h"

namespace mlx_paged::cpu {

// The matrices [n, k] of all experts, one after the other.
struct ExpertWeights {
  WeightView all;                 // [num_experts * n, k]
  const float* bias = nullptr;    // [num_experts, n] or null
  const float* scales = nullptr;  // [num_experts] or null: factors of the products
  int num_experts = 0;

  int n() const { return num_experts ? all.n / num_experts : 0; }
};

// A pair is a token and one of its experts.
struct ExpertArgs {
  const float* x = nullptr;
  int64_t x_row_stride = 0;   // from token to token
  int64_t x_pair_stride = 0;  // from pair to pair of a token; 0: they share the row
  const uint32_t* indices = nullptr;
  int64_t index_row_stride = 0;
  int num_rows = 0;  // tokens
  int per_row = 0;   // experts of a token
  ExpertWeights weights;
  // Second weight of a gated layer: out = silu(x @ weights.T + bias) * (x @ up.T + up's bias).
  std::optional<ExpertWeights> up;
  float* out = nullptr;  // [num_rows, per_row, n]; NaN where there is no such expert

  int num_pairs() const { return num_rows * per_row; }
};

// The pairs in the order of their experts.
class ExpertGroups {
 public:
  void assign(const ExpertArgs& args);

  struct Group {
    int expert;
    int begin, end;  // of pairs()
  };
  const std::vector<Group>& groups() const { return groups_; }
  const std::vector<int>& pairs() const { return pairs_; }
  const std::vector<int>& without() const { return without_; }  // pairs whose expert is none

 private:
  std::vector<int> starts_;
  std::vector<int> pairs_;
  std::vector<int> without_;
  std::vector<Group> groups_;
};

// How many shares are worth it.
int expert_shares(const ExpertArgs& args);

// One of `num_shares` shares of about equal work, of `groups` of these args.
void run_experts(const ExpertArgs& args, const ExpertGroups& groups, int share, int num_shares);

// The same, where each share finds the groups: for few pairs that costs less than a phase of work
// for one thread.
void run_experts(const ExpertArgs& args, int share, int num_shares);

}  // namespace mlx_paged::cpu
