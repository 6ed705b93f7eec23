// Copyright © 2026 the mlx_paged authors. Apache-2.0.

#include "variants.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>

#include "../../metal/kernel_table.h"
#include "../primitives.h"
#include "portable_shape.h"
#include "tensor_shape.h"

namespace mlx_paged::cuda {

namespace {

using Inputs = PagedAttention;

#define ENTRY(unused, dim, columns) {dim, columns},
const std::set<std::pair<int, int>> kTensorKernels = {PAGED_FOR_EACH_TENSOR(ENTRY, unused)};
const std::set<std::pair<int, int>> kQuantisedKernels = {
    PAGED_FOR_EACH_QUANTISED_TENSOR(ENTRY, unused)};

#define ENTRY_PREFILL(unused, dim, warps) {dim, warps},
const std::set<std::pair<int, int>> kPrefillKernels = {
    PAGED_FOR_EACH_PREFILL_TENSOR(ENTRY_PREFILL, unused)};

#define ENTRY_BOUNDS(host_name, ...) host_name "_bounds",
const std::set<std::string> kBoundsKernels = {
    PORTABLE_FOR_EACH_BOUNDS(ENTRY_BOUNDS, float32, float) PORTABLE_FOR_EACH_BOUNDS(
        ENTRY_BOUNDS, float16, half) PORTABLE_FOR_EACH_BOUNDS(ENTRY_BOUNDS, bfloat16, bfloat)};

template <typename Params>
Params params_of(const Launch& launch) {
  Params params;
  std::memcpy(&params, launch.constants.data(), sizeof(params));
  return params;
}

// What a kernel of 16 bits is chosen by.
struct Attention {
  DType dtype;
  int dim;      // of keys and of values
  int queries;  // of the largest item: its rows x the heads of a group
  int num_kv_heads;
};

bool is_quantised(const Arrays& in) {
  return format_of(in[Inputs::kKeyPool].dtype()) != PoolFormat::plain;
}

// Null where tensor cores are not used: fp32, whose inputs they would round; two head dims; blocks
// that end within 16 tokens.
std::optional<Attention> on_tensor_cores(const Launch& launch, const Arrays& in) {
  constexpr int kLeastBlock = 16;
  auto dtype = dtype_of(in[Inputs::kQueries].dtype());
  int dim = layout_of(in[Inputs::kKeyPool]).head_dim;
  if (dtype == DType::float32 || dim != layout_of(in[Inputs::kValuePool]).head_dim ||
      in[Inputs::kKeyPool].shape(1) < kLeastBlock) {
    return std::nullopt;
  }
  auto params = params_of<paged::AttentionParams>(launch);
  int group = params.num_q_heads / params.num_kv_heads;
  return Attention{dtype, dim, params.max_rows * group, params.num_kv_heads};
}

int tiles_of(int queries, int each) {
  return (queries + each - 1) / each;
}

void decode_on_tensor_cores(Launch& launch, const Attention& attention) {
  int dim = attention.dim;
  int columns = tiles_of(attention.queries, paged::TENSOR_QUERIES);
  if (!kTensorKernels.count({dim, columns})) {
    return;
  }
  std::ostringstream name;
  name << "paged_decode_tensor_" << name_of(attention.dtype) << "_" << dim << "_n" << columns;
  launch.kernel = {name.str(), "paged_decode_tensor", ""};
  launch.grid = {launch.grid[0] * uint32_t(attention.num_kv_heads), 1, 1};
  launch.threadgroup = {32 * uint32_t(paged::tensor_warps(dim)), 1, 1};
  launch.threadgroup_memory = paged::tensor_scratch(dim, columns * paged::TENSOR_QUERIES);
}

// The suffix of the kernel of a pair of formats; null: there is none.
const char* quantised_suffix(const Arrays& in) {
  auto keys = format_of(in[Inputs::kKeyPool].dtype());
  auto values = format_of(in[Inputs::kValuePool].dtype());
  if (keys != PoolFormat::int8) {
    return nullptr;
  }
  return values == PoolFormat::int8 ? "_int8" : values == PoolFormat::int4 ? "_int8_int4" : nullptr;
}

bool quantised_on_tensor_cores(Launch& launch, const Attention& attention, const char* suffix) {
  int dim = attention.dim;
  int columns = tiles_of(attention.queries, paged::TENSOR_QUERIES);
  if (!suffix || !kQuantisedKernels.count({dim, columns})) {
    return false;
  }
  std::ostringstream name;
  name << "paged_decode_tensor_" << name_of(attention.dtype) << "_" << dim << "_n" << columns
       << suffix;
  launch.kernel = {name.str(), "paged_decode_quantised", ""};
  launch.grid = {launch.grid[0] * uint32_t(attention.num_kv_heads), 1, 1};
  launch.threadgroup = {32 * uint32_t(paged::tensor_warps(dim)), 1, 1};
  launch.threadgroup_memory = paged::quantised_scratch(dim, columns * paged::TENSOR_QUERIES);
  return true;
}

void prefill_on_tensor_cores(Launch& launch, const Attention& attention) {
  // As many warps as the largest item has queries for. What a warp computes is the same anyway.
  int warps = tiles_of(attention.queries, paged::PREFILL_TENSOR_QUERIES);
  warps = std::min((warps + 1) / 2 * 2, int(paged::PREFILL_TENSOR_WARPS));
  if (!kPrefillKernels.count({attention.dim, warps})) {
    return;
  }
  std::ostringstream name;
  name << "paged_prefill_tensor_" << name_of(attention.dtype) << "_" << attention.dim << "_w"
       << warps;
  launch.kernel = {name.str(), "paged_prefill_tensor", ""};
  launch.grid[2] = uint32_t(tiles_of(attention.queries, warps * paged::PREFILL_TENSOR_QUERIES));
  launch.threadgroup = {32 * uint32_t(warps), 1, 1};
  launch.threadgroup_memory = paged::prefill_tensor_scratch(attention.dim);
}

// The portable kernel for bounds, which has the largest tiles, in place of a portable one.
void with_bounds(Launch& launch, const Arrays& in) {
  auto params = params_of<paged::AttentionParams>(launch);
  int key_dim = in[Inputs::kKeyPool].shape(3);
  int value_dim = in[Inputs::kValuePool].shape(3);
  int item_size = int(in[Inputs::kQueries].itemsize());
  bool prefill = launch.kernel.file == "paged_prefill.h";
  int rows = prefill ? paged::portable_prefill_most_rows(key_dim)
                     : paged::portable_matrix_most_rows(key_dim);
  int groups =
      prefill ? int(paged::PREFILL_SIMD_GROUPS) : paged::portable_matrix_simd_groups(key_dim);
  std::ostringstream name;
  name << (prefill ? "paged_prefill_" : "paged_decode_matrix_")
       << name_of(dtype_of(in[Inputs::kQueries].dtype())) << "_" << key_dim << "_" << value_dim
       << "_m" << rows << "_bounds";
  if (!kBoundsKernels.count(name.str())) {
    throw std::logic_error("[launch] there is no kernel " + name.str());
  }
  launch.kernel = {name.str(), "bounds", ""};
  int group = params.num_q_heads / params.num_kv_heads;
  launch.grid[2] = uint32_t(tiles_of(params.max_rows * group, rows));
  launch.threadgroup = {32 * uint32_t(groups), 1, 1};
  launch.threadgroup_memory =
      prefill ? paged::prefill_scratch(
                    key_dim, value_dim, item_size,
                    paged::portable_prefill_tokens(key_dim, value_dim, item_size))
              : paged::matrix_scratch(key_dim, value_dim, item_size, rows, groups).size;
}

void merge_by_warps(Launch& launch, const Arrays& in) {
  auto params = params_of<paged::MergeParams>(launch);
  std::ostringstream name;
  name << "merge_splits_" << name_of(dtype_of(in[Inputs::kQueries].dtype())) << "_"
       << layout_of(in[Inputs::kValuePool]).head_dim;
  launch.kernel = {name.str(), "merge_splits", ""};
  uint32_t blocks = (params.num_q_heads + paged::MERGE_HEADS - 1) / paged::MERGE_HEADS;
  launch.grid = {launch.grid[0] * blocks, launch.grid[2], 1};
  launch.threadgroup = {32 * paged::MERGE_HEADS, 1, 1};
}

}  // namespace

LaunchList with_variants(LaunchList list, const Arrays& in) {
  for (auto& launch : list.launches) {
    std::string file = launch.kernel.file;
    if (file == "paged_merge.h") {
      merge_by_warps(launch, in);
      continue;
    }
    bool decode = file == "paged_decode.h" || file == "paged_decode_matrix.h";
    if (!decode && file != "paged_prefill.h") {
      continue;
    }
    auto attention = on_tensor_cores(launch, in);
    if (is_quantised(in)) {
      bool served = attention && decode &&
                    quantised_on_tensor_cores(launch, *attention, quantised_suffix(in));
      if (!served) {  // (these ask for bounds at run time)
        launch.kernel.host_name += "_quantised";
      }
      continue;
    }
    if (attention) {
      (decode ? decode_on_tensor_cores : prefill_on_tensor_cores)(launch, *attention);
    }
    bool portable = launch.kernel.file == file;
    if (portable && params_of<paged::AttentionParams>(launch).bounded_rows > 0) {
      with_bounds(launch, in);
    }
  }
  return list;
}

}  // namespace mlx_paged::cuda
