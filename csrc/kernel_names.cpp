// Copyright © 2026 the mlx_paged authors. Apache-2.0.

#include "kernel_names.h"

#include <set>
#include <sstream>
#include <stdexcept>
#include <unordered_map>
#include <utility>

#include "../metal/kernel_table.h"

namespace mlx_paged {

namespace {

#define DECODE(dtype, type, k_dim, v_dim, queries)                             \
  {"paged_decode_" #dtype "_" #k_dim "_" #v_dim "_q" #queries, "paged_decode", \
   "paged_decode<" #type ", " #k_dim ", " #v_dim ", " #queries ">"},
#define DECODE_QUERIES(...) PAGED_FOR_EACH_DECODE_QUERIES(DECODE, __VA_ARGS__)
#define DECODE_DIMS(...) PAGED_FOR_EACH_HEAD_DIM(DECODE_QUERIES, __VA_ARGS__)

#define MATRIX(dtype, type, k_dim, v_dim, rows)                                           \
  {"paged_decode_matrix_" #dtype "_" #k_dim "_" #v_dim "_m" #rows, "paged_decode_matrix", \
   "paged_decode_matrix<" #type ", " #k_dim ", " #v_dim ", " #rows ">"},
#define MATRIX_NARROW(...) PAGED_FOR_EACH_NARROW_MATRIX(MATRIX, __VA_ARGS__)
#define MATRIX_WIDE(...) PAGED_FOR_EACH_WIDE_MATRIX(MATRIX, __VA_ARGS__)
#define MATRIX_DIMS(...)                                \
  PAGED_FOR_EACH_NARROW_DIM(MATRIX_NARROW, __VA_ARGS__) \
  PAGED_FOR_EACH_WIDE_DIM(MATRIX_WIDE, __VA_ARGS__)

#define PREFILL(dtype, type, k_dim, v_dim, rows)                              \
  {"paged_prefill_" #dtype "_" #k_dim "_" #v_dim "_m" #rows, "paged_prefill", \
   "paged_prefill<" #type ", " #k_dim ", " #v_dim ", " #rows ">"},
#define PREFILL_DIMS(...) PAGED_FOR_EACH_PREFILL(PREFILL, __VA_ARGS__)

#define MERGE(dtype, type, v_dim) \
  {"paged_merge_" #dtype "_" #v_dim, "merge", "paged_merge<" #type ", " #v_dim ">"},
#define MERGE_DIMS(...) PAGED_FOR_EACH_V_DIM(MERGE, __VA_ARGS__)

#define STRIDED(bits, type) {"copy_strided_" #bits, "copy_strided", "copy_strided<" #type ">"},

const std::vector<KernelName> kKernels = {
    {"write_kv", "write_kv", ""},
    {"copy_blocks", "copy_blocks", ""},
    {"gather_kv", "gather_kv", ""},
    {"fill_zero", "fill_zero", ""},
    // clang-format off
    PAGED_FOR_EACH_WORD(STRIDED)
    PAGED_FOR_EACH_DTYPE(DECODE_DIMS)
    PAGED_FOR_EACH_DTYPE(MATRIX_DIMS)
    PAGED_FOR_EACH_DTYPE(PREFILL_DIMS)
    PAGED_FOR_EACH_DTYPE(MERGE_DIMS)
    // clang-format on
};

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

}  // namespace

const std::vector<KernelName>& kernel_names() {
  return kKernels;
}

KernelName kernel_named(const std::string& name) {
  static const auto by_name = [] {
    std::unordered_map<std::string, const KernelName*> map;
    for (const auto& kernel : kKernels) {
      map.emplace(kernel.host_name, &kernel);
    }
    return map;
  }();
  auto found = by_name.find(name);
  if (found == by_name.end()) {
    throw std::invalid_argument("[metal] there is no kernel " + name);
  }
  return *found->second;
}

std::string dtype_name(mx::Dtype dtype) {
  if (dtype == mx::float32) {
    return "float32";
  }
  return dtype == mx::float16 ? "float16" : "bfloat16";
}

KernelName decode_kernel(mx::Dtype dtype, int key_dim, int value_dim, int queries) {
  require_dims(key_dim, value_dim);
  return kernel_named(
      join("paged_decode_", dtype_name(dtype), "_", key_dim, "_", value_dim, "_q", queries));
}

KernelName decode_matrix_kernel(mx::Dtype dtype, int key_dim, int value_dim, int rows) {
  require_dims(key_dim, value_dim);
  return kernel_named(
      join("paged_decode_matrix_", dtype_name(dtype), "_", key_dim, "_", value_dim, "_m", rows));
}

KernelName prefill_kernel(mx::Dtype dtype, int key_dim, int value_dim, int rows) {
  require_dims(key_dim, value_dim);
  return kernel_named(
      join("paged_prefill_", dtype_name(dtype), "_", key_dim, "_", value_dim, "_m", rows));
}

KernelName merge_kernel(mx::Dtype dtype, int value_dim) {
  return kernel_named(join("paged_merge_", dtype_name(dtype), "_", value_dim));
}

}  // namespace mlx_paged
