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

  // `expert_of(row, i)`: the expert of pair i of a row as a uint32.
  template <typename ExpertOf>
  void assign(int num_experts, int num_rows, int per_row, const ExpertOf& expert_of);

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

template <typename ExpertOf>
void ExpertGroups::assign(int num_experts, int num_rows, int per_row, const ExpertOf& expert_of) {
  starts_.assign(num_experts + 1, 0);
  pairs_.resize(num_rows * per_row);
  without_.clear();
  groups_.clear();
  auto for_pairs = [&](auto body) {
    int pair = 0;
    for (int row = 0; row < num_rows; row++) {
      for (int i = 0; i < per_row; i++, pair++) {
        body(pair, expert_of(row, i));
      }
    }
  };
  for_pairs([&](int pair, uint32_t expert) {
    if (expert < uint32_t(num_experts)) {
      starts_[expert + 1]++;
    } else {
      without_.push_back(pair);
    }
  });
  for (int e = 0; e < num_experts; e++) {
    int count = starts_[e + 1];
    starts_[e + 1] += starts_[e];
    if (count) {
      groups_.push_back({e, starts_[e], starts_[e + 1]});
    }
  }
  for_pairs([&](int pair, uint32_t expert) {
    if (expert < uint32_t(num_experts)) {
      pairs_[starts_[expert]++] = pair;
    }
  });
}

// Number of shares worth running in parallel.
int expert_shares(const ExpertArgs& args);

// Runs one of `num_shares` shares of about equal work. `groups` must match `args`.
void run_experts(const ExpertArgs& args, const ExpertGroups& groups, int share, int num_shares);

// The same, finding the groups in each share: for few pairs that costs less than a separate
// single-threaded phase.
void run_experts(const ExpertArgs& args, int share, int num_shares);

}  // namespace mlx_paged::cpu
