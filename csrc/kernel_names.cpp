// Copyright © 2026 the mlx_paged authors. Apache-2.0.

#include "kernel_names.h"

#include <set>
#include <sstream>
#include <stdexcept>
#include <unordered_map>
#include <utility>
#include <vector>

#include "../metal/kernel_table.h"
#include "cuda/portable_shape.h"

namespace mlx_paged {

namespace {

#define DATA(name) {#name, "data.h", ""},
#define INSTANCE(function, ...) #function "<" #__VA_ARGS__ ">"
#define DATA_TEMPLATE(host_name, ...) {host_name, "data.h", INSTANCE(__VA_ARGS__)},
#define QUANTIZED_TEMPLATE(host_name, ...) {host_name, "quantized_pool.h", INSTANCE(__VA_ARGS__)},
#define LAYER_TEMPLATE(host_name, ...) {host_name, "layer.h", INSTANCE(__VA_ARGS__)},
#define PRODUCT_TEMPLATE(host_name, ...) {host_name, "products.h", INSTANCE(__VA_ARGS__)},
#define EXPERT_TEMPLATE(host_name, ...) {host_name, "experts.h", INSTANCE(__VA_ARGS__)},
#define LORA_TEMPLATE(host_name, ...) {host_name, "lora.h", INSTANCE(__VA_ARGS__)},
#define GREEDY_TEMPLATE(host_name, ...) {host_name, "greedy.h", INSTANCE(__VA_ARGS__)},
#define DRAW_TEMPLATE(host_name, ...) {host_name, "draw.h", INSTANCE(__VA_ARGS__)},
#define THRESHOLD_TEMPLATE(host_name, ...) {host_name, "thresholds.h", INSTANCE(__VA_ARGS__)},
#define OWN_FILE_TEMPLATE(host_name, function, ...) \
  {host_name, #function ".h", INSTANCE(function, __VA_ARGS__)},
// Plain arrays, because GCC takes 7 s to compile std::vector<KernelName> tables of this length.
struct KernelRow {
  const char* host_name;
  const char* file;
  const char* instantiation;
};
constexpr KernelRow kKernels[] = {
    // clang-format off
    PAGED_FOR_EACH_DATA_KERNEL(DATA)
    PAGED_FOR_EACH_DATA_TEMPLATE(DATA_TEMPLATE)
    PAGED_FOR_EACH_QUANTIZED_TEMPLATE(QUANTIZED_TEMPLATE)
    PAGED_FOR_EACH_LAYER_TEMPLATE(LAYER_TEMPLATE)
    PAGED_FOR_EACH_PRODUCT_TEMPLATE(PRODUCT_TEMPLATE)
    PAGED_FOR_EACH_EXPERT_TEMPLATE(EXPERT_TEMPLATE)
    PAGED_FOR_EACH_LORA_TEMPLATE(LORA_TEMPLATE)
    PAGED_FOR_EACH_GREEDY_TEMPLATE(GREEDY_TEMPLATE)
    PAGED_FOR_EACH_DRAW_TEMPLATE(DRAW_TEMPLATE)
    {"merge_draws", "draw.h", ""},
    PAGED_FOR_EACH_THRESHOLD_TEMPLATE(THRESHOLD_TEMPLATE)
    PAGED_FOR_EACH_ATTENTION_TEMPLATE(OWN_FILE_TEMPLATE)
    PAGED_FOR_EACH_TENSOR_TEMPLATE(OWN_FILE_TEMPLATE)
    // clang-format on
};

// Attention kernels for NVIDIA GPUs, compiled by nvcc.
#define PORTABLE_ATTENTION(X)                       \
  PAGED_FOR_EACH_DTYPE(PORTABLE_FOR_EACH_DECODE, X) \
  PAGED_FOR_EACH_DTYPE(PORTABLE_FOR_EACH_MATRIX, X) \
  PAGED_FOR_EACH_DTYPE(PORTABLE_FOR_EACH_PREFILL, X)
constexpr KernelRow kPortableKernels[] = {PORTABLE_ATTENTION(OWN_FILE_TEMPLATE)};

#define DIMS(unused, k_dim, v_dim) {k_dim, v_dim},
const std::set<std::pair<int, int>> kHeadDims = {PAGED_FOR_EACH_HEAD_DIM(DIMS, unused)};

template <typename... Parts>
std::string join(const Parts&... parts) {
  std::ostringstream s;
  (s << ... << parts);
  return s.str();
}

void require_dims(int key_dim, int value_dim) {
  if (kHeadDims.count({key_dim, value_dim})) {
    return;
  }
  std::ostringstream known;
  for (auto [k, v] : kHeadDims) {
    known << (known.tellp() ? ", " : "") << k;
    if (k != v) {
      known << "/" << v;
    }
  }
  throw std::invalid_argument(join(
      "[paged_attention] head_dim (of keys/values) must be one of ", known.str(),
      " on a GPU but got ", key_dim, "/", value_dim));
}

using ByName = std::unordered_map<std::string, const KernelName*>;

template <size_t N>
std::vector<KernelName> to_names(const KernelRow (&rows)[N]) {
  std::vector<KernelName> names;
  names.reserve(N);
  for (const auto& row : rows) {
    names.push_back({row.host_name, row.file, row.instantiation});
  }
  return names;
}

ByName map_of(const std::vector<KernelName>& kernels) {
  ByName map;
  for (const auto& kernel : kernels) {
    map.emplace(kernel.host_name, &kernel);
  }
  return map;
}

KernelName find(const std::string& name, const ByName& by_name) {
  auto found = by_name.find(name);
  if (found == by_name.end()) {
    throw std::invalid_argument("[metal] no kernel is named " + name);
  }
  return *found->second;
}

}  // namespace

const std::vector<KernelName>& kernel_names() {
  static const auto names = to_names(kKernels);
  return names;
}

KernelName kernel_named(const std::string& name) {
  static const auto by_name = map_of(kernel_names());
  return find(name, by_name);
}

bool has_kernels(int key_dim, int value_dim) {
  return kHeadDims.count({key_dim, value_dim}) > 0;
}

KernelName attention_kernel(
    Gpu gpu, const char* function, DType dtype, int key_dim, int value_dim, const char* unit,
    int size) {
  require_dims(key_dim, value_dim);
  auto name = join(function, "_", name_of(dtype), "_", key_dim, "_", value_dim, "_", unit, size);
  if (gpu == Gpu::nvidia) {
    static const auto names = to_names(kPortableKernels);
    static const auto by_name = map_of(names);
    return find(name, by_name);
  }
  return kernel_named(name);
}

KernelName quantized_kernel(const std::string& function, DType dtype, int max_dims) {
  for (int dims : {64, 128, 256, 576}) {
    if (max_dims <= dims) {
      return kernel_named(join(function, "_", name_of(dtype), "_", dims));
    }
  }
  throw std::invalid_argument(join(
      "[", function, "] head_dim of a quantized pool must be at most 576 on a GPU but got ",
      max_dims));
}

KernelName merge_kernel(DType dtype, int value_dim) {
  return kernel_named(join("paged_merge_", name_of(dtype), "_", value_dim));
}

}  // namespace mlx_paged
