// Copyright © 2026 the mlx_paged authors. Apache-2.0.

#include "variants.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>

#include "../../metal/kernel_table.h"
#include "../attention_plan.h"
#include "../primitives.h"
#include "portable_shape.h"
#include "tensor_shape.h"

namespace mlx_paged::cuda {

namespace {

using Inputs = PagedAttention;

#define ENTRY(unused, dim, columns) {dim, columns},
const std::set<std::pair<int, int>> kTensorKernels = {PAGED_FOR_EACH_TENSOR(ENTRY, unused)};

// Name suffixes of kernels, by key and value format.
#define ENTRY_FORMATS(unused, suffix, keys, values) {{paged::keys, paged::values}, "_" #suffix},
const std::map<std::pair<int, int>, std::string> kFormats = {
    PAGED_QUANTIZED_FORMATS(ENTRY_FORMATS, unused)};

#define ENTRY_QUANTIZED(unused, dim, columns, ...) {dim, columns},
const std::set<std::pair<int, int>> kQuantizedKernels = {
    PAGED_FOR_EACH_QUANTIZED_TENSOR(ENTRY_QUANTIZED, unused)};

#define ENTRY_ROWS(unused, dim, ...) dim,
const std::set<int> kRowDims = {PAGED_FOR_EACH_ROTATED_ROWS(ENTRY_ROWS, unused)};

#define ENTRY_PREFILL(unused, dim, warps) {dim, warps},
const std::set<std::pair<int, int>> kPrefillKernels = {
    PAGED_FOR_EACH_PREFILL_TENSOR(ENTRY_PREFILL, unused)};
const std::set<std::pair<int, int>> kPrefillWgmmaKernels = {
    PAGED_FOR_EACH_PREFILL_WGMMA(ENTRY_PREFILL, unused)};

#define ENTRY_LARGEST(host_name, ...) host_name,
const std::set<std::string> kLargestTiles = {
    PORTABLE_FOR_EACH_LARGEST(ENTRY_LARGEST, float32, float) PORTABLE_FOR_EACH_LARGEST(
        ENTRY_LARGEST, float16, half) PORTABLE_FOR_EACH_LARGEST(ENTRY_LARGEST, bfloat16, bfloat)};

template <typename Params>
Params params_of(const Launch& launch) {
  Params params;
  std::memcpy(&params, launch.constants.data(), sizeof(params));
  return params;
}

constexpr int kMinBlock = 16;  // tokens: a tile must lie in one block

// Properties that select a 16-bit kernel.
struct Attention {
  DType dtype;
  int dim;      // of keys and values
  int queries;  // of the largest item: its rows x heads per group
  int num_kv_heads;
};

bool is_quantized(const Arrays& in) {
  return format_of(in[Inputs::kKeyPool].dtype()) != PoolFormat::plain;
}

// Null if tensor cores are not used: for fp32, which they would round; for different head dims of
// keys and values; for blocks of fewer than 16 tokens.
std::optional<Attention> on_tensor_cores(const Launch& launch, const Arrays& in) {
  auto dtype = dtype_of(in[Inputs::kQueries].dtype());
  int dim = layout_of(in[Inputs::kKeyPool]).head_dim;
  if (dtype == DType::float32 || dim != layout_of(in[Inputs::kValuePool]).head_dim ||
      in[Inputs::kKeyPool].shape(1) < kMinBlock) {
    return std::nullopt;
  }
  auto params = params_of<paged::AttentionParams>(launch);
  int group = params.num_q_heads / params.num_kv_heads;
  return Attention{dtype, dim, params.max_rows * group, params.num_kv_heads};
}

int tiles_of(int queries, int tile_rows) {
  return (queries + tile_rows - 1) / tile_rows;
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

bool quantized_on_tensor_cores(Launch& launch, const Attention& attention) {
  auto params = params_of<paged::AttentionParams>(launch);
  int dim = attention.dim;
  int columns = tiles_of(attention.queries, paged::TENSOR_QUERIES);
  auto formats = kFormats.find({params.key_format, params.value_format});
  if (formats == kFormats.end() || !kQuantizedKernels.count({dim, columns})) {
    return false;
  }
  std::ostringstream name;
  name << "paged_decode_tensor_" << name_of(attention.dtype) << "_" << dim << "_n" << columns
       << formats->second;
  launch.kernel = {name.str(), "paged_decode_quantized", ""};
  launch.grid = {launch.grid[0] * uint32_t(attention.num_kv_heads), 1, 1};
  launch.threadgroup = {32 * uint32_t(paged::quantized_warps(dim)), 1, 1};
  launch.threadgroup_memory = paged::quantized_scratch(
      params.key_format, params.value_format, dim, columns * paged::TENSOR_QUERIES);
  return true;
}

// Assigns `dim` / ROW_PART lanes to each of `num_rows` rows.
void by_rows(Launch& launch, int64_t num_rows, int dim) {
  int64_t threads = num_rows * (dim / paged::ROW_PART);
  launch.grid[0] = uint32_t((threads + paged::ROW_THREADS - 1) / paged::ROW_THREADS);
  launch.threadgroup = {paged::ROW_THREADS, 1, 1};
}

void write_by_rows(Launch& launch, const std::string& dtype) {
  auto params = params_of<paged::QuantizeParams>(launch);
  auto formats = kFormats.find({params.key_format, params.value_format});
  if (params.key_dim != params.value_dim || !kRowDims.count(params.key_dim) ||
      formats == kFormats.end()) {
    return;
  }
  launch.kernel = {
      "quantize_rows_" + dtype + "_" + std::to_string(params.key_dim) + formats->second,
      "quantize_rows", ""};
  by_rows(launch, int64_t(params.num_tokens) * params.num_kv_heads, params.key_dim);
  launch.grid[1] = 2;  // keys and values
}

void rotate_by_rows(Launch& launch, const std::string& dtype) {
  auto params = params_of<paged::RotateParams>(launch);
  if (kRowDims.count(params.dim)) {
    launch.kernel = {
        "rotate_rows_" + dtype + "_" + std::to_string(params.dim), "quantize_rows", ""};
    by_rows(launch, params.num_rows, params.dim);
  }
}

// Replaces kernels of quantized_pool.h with their variants in quantize_rows.h if there are any.
void by_rows(Launch& launch) {
  std::string name = launch.kernel.host_name;
  size_t end = name.rfind('_');  // before the head dims
  size_t begin = name.rfind('_', end - 1) + 1;
  std::string dtype = name.substr(begin, end - begin);
  if (name.starts_with("quantize_kv_")) {
    write_by_rows(launch, dtype);
  } else if (name.starts_with("rotate_queries_")) {
    rotate_by_rows(launch, dtype);
  }
}

void prefill_on_tensor_cores(Launch& launch, const Attention& attention) {
  // Launch as many warps as the largest item needs. A warp's result does not depend on their
  // number.
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

// Map of a pool for the copy engine, in boxes of 64 dims of one head's tokens. `buffer`: buffer
// index in the launch.
MatrixMap map_of_pool(const mx::array& pool, int buffer) {
  int columns = pool.shape(2) * pool.shape(3);
  return {buffer, 2, pool.shape(0) * pool.shape(1), columns, columns, paged::PREFILL_BOX_TOKENS,
          64};
}

// Uses warpgroup products where one warp is too few. Same bits.
bool prefill_by_four_warps(Launch& launch, const Attention& attention, const Arrays& in) {
  constexpr int kKeyBuffer = 1;  // buffer of keys in an attention launch; values follow
  const auto& pool = in[Inputs::kKeyPool];
  int groups = tiles_of(attention.queries, int(paged::WGMMA_WARPS) * paged::PREFILL_TENSOR_QUERIES);
  int warps = std::min(groups * paged::WGMMA_WARPS, int(paged::PREFILL_TENSOR_WARPS));
  if (attention.queries <= paged::PREFILL_TENSOR_QUERIES ||
      !kPrefillWgmmaKernels.count({attention.dim, warps}) ||
      int64_t(pool.shape(0)) * pool.shape(1) > std::numeric_limits<int>::max()) {
    return false;
  }
  std::ostringstream name;
  name << "paged_prefill_wgmma_" << name_of(attention.dtype) << "_" << attention.dim << "_w"
       << warps;
  launch.kernel = {name.str(), "paged_prefill_wgmma", ""};
  launch.grid[2] = uint32_t(tiles_of(attention.queries, warps * paged::PREFILL_TENSOR_QUERIES));
  launch.threadgroup = {32 * uint32_t(warps + paged::WGMMA_WARPS), 1, 1};  // four producer warps
  launch.threadgroup_memory = paged::prefill_wgmma_scratch(attention.dim);
  launch.maps = {
      map_of_pool(pool, kKeyBuffer), map_of_pool(in[Inputs::kValuePool], kKeyBuffer + 1)};
  return true;
}

// Replaces a portable kernel with the one for bounds and row options, which has the largest tiles.
void with_largest_tiles(Launch& launch, const Arrays& in, const std::string& file) {
  auto params = params_of<paged::AttentionParams>(launch);
  int key_dim = layout_of(in[Inputs::kKeyPool]).head_dim;
  int value_dim = layout_of(in[Inputs::kValuePool]).head_dim;
  int item_size = int(in[Inputs::kQueries].itemsize());
  bool prefill = launch.kernel.file == "paged_prefill.h";
  int rows = prefill ? paged::portable_prefill_max_rows(key_dim)
                     : paged::portable_matrix_max_rows(key_dim);
  int groups =
      prefill ? int(paged::PREFILL_SIMD_GROUPS) : paged::portable_matrix_simd_groups(key_dim);
  std::ostringstream name;
  name << (prefill ? "paged_prefill_" : "paged_decode_matrix_")
       << name_of(dtype_of(in[Inputs::kQueries].dtype())) << "_" << key_dim << "_" << value_dim
       << "_m" << rows;
  if (!kLargestTiles.count(name.str())) {
    throw std::logic_error("[launch] no kernel is named " + name.str() + "_" + file);
  }
  launch.kernel = {name.str() + "_" + file, file, ""};
  int group = params.num_q_heads / params.num_kv_heads;
  launch.grid[2] = uint32_t(tiles_of(params.max_rows * group, rows));
  launch.threadgroup = {32 * uint32_t(groups), 1, 1};
  launch.threadgroup_memory =
      prefill ? paged::prefill_scratch(
                    key_dim, value_dim, item_size,
                    paged::portable_prefill_tokens(key_dim, value_dim, item_size))
              : paged::matrix_scratch(key_dim, value_dim, item_size, rows, groups).size;
}

// True if the launch has a kernel in which a row has the same bits whatever the other rows of its
// item are.
bool is_decode_on_tensor_cores(const Launch& launch) {
  return launch.kernel.file == "paged_decode_tensor" ||
         launch.kernel.file == "paged_decode_quantized";
}

// Serves the items of two launches, such as decodes and drafts, by the one with more queries. Both
// would read all items.
void join_decodes(Launch& fewer, const Launch& more) {
  auto params = params_of<paged::AttentionParams>(fewer);
  auto others = params_of<paged::AttentionParams>(more);
  fewer.kernel = more.kernel;
  fewer.threadgroup_memory = more.threadgroup_memory;
  params.max_rows = others.max_rows;
  fewer.constants = bytes_of(params);
}

// Lets a launch of drafts serve as many rows as its kernel can, so that steps with other numbers of
// drafts have the same launch, which is captured once.
void widen_to_kernel(Launch& launch) {
  auto params = params_of<paged::AttentionParams>(launch);
  if (params.max_rows > 1) {
    int group = params.num_q_heads / params.num_kv_heads;
    int queries = tiles_of(params.max_rows * group, paged::TENSOR_QUERIES) * paged::TENSOR_QUERIES;
    params.min_rows = 1;
    params.max_rows = queries / group;
    launch.constants = bytes_of(params);
  }
}

void merge_by_warps(Launch& launch, const Arrays& in) {
  auto params = params_of<paged::MergeParams>(launch);
  std::ostringstream name;
  name << "merge_splits_" << name_of(dtype_of(in[Inputs::kQueries].dtype())) << "_"
       << layout_of(in[Inputs::kValuePool]).head_dim;
  launch.kernel = {name.str(), "merge_splits", ""};
  uint32_t blocks = (params.num_q_heads + paged::MERGE_HEADS - 1) / paged::MERGE_HEADS;
  // More rows than an item has cost little, and the launch stays while drafts become more or fewer.
  launch.grid = {launch.grid[0] * blocks, std::bit_ceil(launch.grid[2]), 1};
  launch.threadgroup = {32 * paged::MERGE_HEADS, 1, 1};
}

}  // namespace

bool has_wgmma_prefill(int key_dim, int value_dim, int block_size) {
  return key_dim == value_dim && block_size >= kMinBlock &&
         kPrefillWgmmaKernels.count({key_dim, paged::WGMMA_WARPS});
}

int max_shared_rows(const AttentionLayer& layer, int block_size) {
  bool is_plain = layer.key_format == PoolFormat::plain;
  auto formats = std::pair(int(layer.key_format), int(layer.value_format));
  if (layer.dtype == DType::float32 || layer.key_dim != layer.value_dim || block_size < kMinBlock ||
      (layer.features & paged::FEATURE_ALIBI) || (!is_plain && !kFormats.count(formats))) {
    return 1;
  }
  const auto& kernels = is_plain ? kTensorKernels : kQuantizedKernels;
  int columns = 0;
  while (kernels.count({layer.key_dim, columns + 1})) {
    columns++;
  }
  return std::clamp(columns * paged::TENSOR_QUERIES / layer.group, 1, kMaxDraftRows);
}

LaunchList with_variants(LaunchList list, const Arrays& in, TmaKernels tma) {
  for (auto& launch : list.launches) {
    std::string file = launch.kernel.file;
    if (file == "paged_merge.h") {
      merge_by_warps(launch, in);
      continue;
    }
    if (file == "quantized_pool.h") {
      by_rows(launch);
      continue;
    }
    bool decode = file == "paged_decode.h" || file == "paged_decode_matrix.h";
    if (!decode && file != "paged_prefill.h") {
      continue;
    }
    auto options = params_of<paged::AttentionParams>(launch).options;
    if (paged::has_row_options(options)) {
      with_largest_tiles(launch, in, "general");
      continue;
    }
    auto attention = on_tensor_cores(launch, in);
    if (is_quantized(in)) {
      bool served = attention && decode && quantized_on_tensor_cores(launch, *attention);
      if (!served) {  // those test for bounds at run time
        launch.kernel.host_name += "_quantized";
      }
      continue;
    }
    if (attention && decode) {
      decode_on_tensor_cores(launch, *attention);
    } else if (
        attention && !(tma == TmaKernels::wgmma && prefill_by_four_warps(launch, *attention, in))) {
      prefill_on_tensor_cores(launch, *attention);
    }
    bool portable = launch.kernel.file == file;
    if (portable && options.bounded_rows > 0) {
      with_largest_tiles(launch, in, "bounds");
    }
  }
  auto& launches = list.launches;
  for (size_t i = 1; i < launches.size();) {
    if (is_decode_on_tensor_cores(launches[i - 1]) && is_decode_on_tensor_cores(launches[i])) {
      join_decodes(launches[i - 1], launches[i]);
      launches.erase(launches.begin() + i);
    } else {
      i++;
    }
  }
  for (auto& launch : launches) {
    if (is_decode_on_tensor_cores(launch)) {
      widen_to_kernel(launch);
    }
  }
  return list;
}

void rows_in_order(Launch& launch, CodeOrder order) {
  std::ostringstream name;
  name << launch.kernel.host_name << "_ordered_" << order.run << "_" << order.apart;
  launch.kernel = {name.str(), launch.kernel.file, ""};
}

Extent kernel_grid(const Launch& launch) {
  constexpr uint32_t kMaxGroups = 65535;  // along y and z
  Extent grid = launch.grid;
  const auto& name = launch.kernel.host_name;
  if (name == "write_kv" || name.starts_with("quantize_kv") || name == "copy_blocks" ||
      name.starts_with("apply_token_bitmask")) {
    std::swap(grid[0], grid[1]);
  } else if (name.starts_with("copy_strided")) {
    std::swap(grid[0], grid[2]);
  }
  if (grid[1] > kMaxGroups || grid[2] > kMaxGroups) {
    throw std::invalid_argument(
        "[cuda] a grid of " + launch.kernel.host_name + " must have at most 65535 groups along y " +
        "and z but has " + std::to_string(grid[1]) + " and " + std::to_string(grid[2]));
  }
  return grid;
}

}  // namespace mlx_paged::cuda
