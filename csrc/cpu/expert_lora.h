// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Low-rank adapters of experts on the CPU: like lora.h, with a pair of matrices for each expert of
// each adapter.

#pragma once

#include <cstdint>

#include "experts.h"
#include "lora.h"

namespace mlx_paged::cpu {

// A pair is a token and one of its experts.
struct ExpertLoraArgs {
  LoraShape shape;  // num_adapters: adapters x experts
  int num_experts = 0;
  const char* a = nullptr;  // [num_adapters, rank, k]
  const char* b = nullptr;  // [num_adapters, rank, n]
  const float* x = nullptr;
  int64_t x_row_stride = 0;           // between tokens
  int64_t x_pair_stride = 0;          // between the pairs of a token; 0: they share the row
  const int32_t* adapters = nullptr;  // [num_rows]; no adapter if out of range
  const uint32_t* experts = nullptr;
  int64_t expert_row_stride = 0;
  const float* base = nullptr;
  int64_t base_row_stride = 0;
  float* out = nullptr;  // [num_rows, per_row, n]
  int num_rows = 0;      // tokens
  int per_row = 0;       // experts per token

  int num_pairs() const { return num_rows * per_row; }
};

// The inputs of an ExpertLora node, without addresses.
ExpertLoraArgs expert_lora_args(const Arrays& in);

// Sorts pairs by their matrices.
void assign(ExpertGroups& groups, const ExpertLoraArgs& args);

// Number of shares worth running in parallel.
int expert_lora_shares(const ExpertLoraArgs& args);

// Runs one of `num_shares` shares of about equal work. `groups` must match `args`. Pairs of one
// group share reads of their matrices; a pair's bits do not depend on the others.
void run_expert_lora(
    const ExpertLoraArgs& args, const ExpertGroups& groups, int share, int num_shares);

}  // namespace mlx_paged::cpu
