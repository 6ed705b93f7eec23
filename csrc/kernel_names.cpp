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

#define DATA(name) {#name, "data.h", ""},
#define INSTANCE(function, ...) #function "<" #__VA_ARGS__ ">"
#define DATA_TEMPLATE(host_name, ...) {host_name, "data.h", INSTANCE(__VA_ARGS__)},
#define ATTENTION_TEMPLATE(host_name, function, ...) \
  {host_name, #function ".h", INSTANCE(function, __VA_ARGS__)},
const std::vector<KernelName> kKernels = {
    // clang-format off
    PAGED_FOR_EACH_DATA_KERNEL(DATA)
    PAGED_FOR_EACH_DATA_TEMPLATE(DATA_TEMPLATE)
    PAGED_FOR_EACH_ATTENTION_TEMPLATE(ATTENTION_TEMPLATE)
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

KernelName attention_kernel(
    const char* function, DType dtype, int key_dim, int value_dim, const char* unit, int size) {
  require_dims(key_dim, value_dim);
  return kernel_named(
      join(function, "_", name_of(dtype), "_", key_dim, "_", value_dim, "_", unit, size));
}

KernelName merge_kernel(DType dtype, int value_dim) {
  return kernel_named(join("paged_merge_", name_of(dtype), "_", value_dim));
}

}  // namespace mlx_paged
