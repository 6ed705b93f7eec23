// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Verdicts of calibration (mlx_paged/calibration) on this machine: kernels that must not run, the
// largest steps that may run as a whole, and the best of several ways. Set when an engine starts,
// read where launches are chosen. Thread-safe.

#pragma once

#include <string>
#include <vector>

#include "kernel_names.h"

namespace mlx_paged {

// Replaces the set of rejected kernels, by host name.
void reject_kernels(const std::vector<std::string>& host_names);
std::vector<std::string> rejected_kernels();
bool is_rejected(const std::string& host_name);
// Changes with every call of reject_kernels and allow_tensor_kernels.
int rejection_count();

// True if kernels for tensor units (metal/tensor_*.h) may run unless they are rejected. False until
// calibration has found that this machine compiles them.
bool allows_tensor_kernels();
void allow_tensor_kernels(bool allowed);

// Maximum rows of a step that may run as a whole. On Apple's GPUs 0 until calibration allows more,
// elsewhere unlimited.
int allowed_step_rows(Gpu gpu);
void allow_step_rows(int num_rows);

// A kernel that calibration found no slower than MLX's for products of these rows.
struct AllowedProduct {
  std::string host_name;
  int min_rows;
  int max_rows;
};

// Replaces the kernels that may multiply outside of whole steps on Apple's GPUs. None until then.
void allow_products(const std::vector<AllowedProduct>& products);
std::vector<AllowedProduct> allowed_products();
bool allows_any_product();
bool allows_product(const std::string& host_name, int num_rows);

// Minimum tokens of context per work item of a decode on a GPU; 0: the built-in number.
int piece_tokens();
void set_piece_tokens(int num_tokens);

}  // namespace mlx_paged
