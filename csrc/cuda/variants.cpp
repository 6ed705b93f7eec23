// Copyright © 2026 the mlx_paged authors. Apache-2.0.

#include "variants.h"

#include <algorithm>
#include <cstring>
#include <set>
#include <sstream>
#include <utility>

#include "../../metal/params.h"
#include "decode_tensor_shape.h"
#include "kernels/tensor_table.h"
#include "merge_shape.h"
#include "prefill_tensor_shape.h"

namespace mlx_paged::cuda {

namespace {

enum { kQueries, kKeyPool, kValuePool };  // operands of PagedAttention

#define ENTRY(unused, dim, columns) {dim, columns},
const std::set<std::pair<int, int>> kTensorKernels = {PAGED_FOR_EACH_TENSOR(ENTRY, unused)};

#define ENTRY_PREFILL(unused, dim, warps) {dim, warps},
const std::set<std::pair<int, int>> kPrefillKernels = {
    PAGED_FOR_EACH_PREFILL_TENSOR(ENTRY_PREFILL, unused)};

template <typename Params>
Params params_of(const Launch& launch) {
  Params params;
  std::memcpy(&params, launch.constants.data(), sizeof(params));
  return params;
}

const char* name_of(mx::Dtype dtype) {
  if (dtype == mx::float32) {
    return "float32";
  }
  return dtype == mx::float16 ? "float16" : "bfloat16";
}

void use_tensor_cores(Launch& launch, const std::vector<mx::array>& in) {
  auto dtype = in[kQueries].dtype();
  int block_size = in[kKeyPool].shape(1);
  int dim = in[kKeyPool].shape(3);
  auto params = params_of<paged::AttentionParams>(launch);
  int queries = params.max_rows * (params.num_q_heads / params.num_kv_heads);
  int columns = (queries + paged::TENSOR_QUERIES - 1) / paged::TENSOR_QUERIES;
  if (dtype == mx::float32 || dim != in[kValuePool].shape(3) || block_size < paged::TENSOR_TOKENS ||
      !kTensorKernels.count({dim, columns})) {
    return;
  }
  std::ostringstream name;
  name << "paged_decode_tensor_" << name_of(dtype) << "_" << dim << "_n" << columns;
  launch.kernel = {name.str(), "paged_decode_tensor", ""};
  launch.grid = {launch.grid[0] * uint32_t(params.num_kv_heads), 1, 1};
  launch.threadgroup = {32 * uint32_t(paged::tensor_warps(dim)), 1, 1};
  launch.threadgroup_memory = paged::tensor_scratch(dim, columns * paged::TENSOR_QUERIES);
}

void prefill_on_tensor_cores(Launch& launch, const std::vector<mx::array>& in) {
  auto dtype = in[kQueries].dtype();
  int block_size = in[kKeyPool].shape(1);
  int dim = in[kKeyPool].shape(3);
  auto params = params_of<paged::AttentionParams>(launch);
  int queries = params.max_rows * (params.num_q_heads / params.num_kv_heads);
  // As many warps as the largest item has queries for. What a warp computes is the same anyway.
  int warps = (queries + paged::PREFILL_TENSOR_QUERIES - 1) / paged::PREFILL_TENSOR_QUERIES;
  warps = std::min((warps + 1) / 2 * 2, int(paged::PREFILL_TENSOR_WARPS));
  if (dtype == mx::float32 || dim != in[kValuePool].shape(3) || block_size < 16 ||
      !kPrefillKernels.count({dim, warps})) {
    return;
  }
  std::ostringstream name;
  name << "paged_prefill_tensor_" << name_of(dtype) << "_" << dim << "_w" << warps;
  launch.kernel = {name.str(), "paged_prefill_tensor", ""};
  int tile = warps * paged::PREFILL_TENSOR_QUERIES;
  launch.grid[2] = uint32_t((queries + tile - 1) / tile);
  launch.threadgroup = {32 * uint32_t(warps), 1, 1};
  launch.threadgroup_memory = paged::prefill_tensor_scratch(dim);
}

void merge_by_blocks(Launch& launch, const std::vector<mx::array>& in) {
  auto params = params_of<paged::MergeParams>(launch);
  std::ostringstream name;
  name << "merge_splits_" << name_of(in[kQueries].dtype()) << "_" << in[kValuePool].shape(3);
  launch.kernel = {name.str(), "merge_splits", ""};
  uint32_t blocks = (params.num_q_heads + paged::MERGE_HEADS - 1) / paged::MERGE_HEADS;
  launch.grid = {launch.grid[0] * blocks, launch.grid[2], 1};
  launch.threadgroup = {32 * paged::MERGE_HEADS, 1, 1};
}

}  // namespace

LaunchList with_variants(LaunchList list, const std::vector<mx::array>& in) {
  for (auto& launch : list.launches) {
    const auto& file = launch.kernel.file;
    if (file == "paged_decode" || file == "paged_decode_matrix") {
      use_tensor_cores(launch, in);
    } else if (file == "paged_prefill") {
      prefill_on_tensor_cores(launch, in);
    } else if (file == "merge") {
      merge_by_blocks(launch, in);
    }
  }
  return list;
}

}  // namespace mlx_paged::cuda
