// Copyright © 2026 the mlx_paged authors. Apache-2.0.

#include "dtype.h"

#include <stdexcept>

#include "mlx/array.h"
#include "mlx/dtype.h"

namespace mlx_paged {

namespace {

struct DTypeName {
  DType dtype;
  const char* name;
  mlx::core::Dtype mlx;
};

#define ENTRY(unused, name, type) {DType::name, #name, mlx::core::name},
const DTypeName kDTypeNames[] = {PAGED_FOR_EACH_DTYPE(ENTRY, unused)};

const DTypeName* find(const mlx::core::Dtype& dtype) {
  for (const auto& entry : kDTypeNames) {
    if (entry.mlx == dtype) {
      return &entry;
    }
  }
  return nullptr;
}

}  // namespace

const char* name_of(DType dtype) {
  return kDTypeNames[int(dtype)].name;
}

bool is_supported(const mlx::core::Dtype& dtype) {
  return find(dtype) != nullptr;
}

DType dtype_of(const mlx::core::Dtype& dtype) {
  const auto* entry = find(dtype);
  if (!entry) {
    throw std::logic_error("[mlx_paged] no kernel supports this dtype");
  }
  return entry->dtype;
}

bool is_pool_dtype(const mlx::core::Dtype& dtype) {
  return is_supported(dtype) || format_of(dtype) != PoolFormat::plain;
}

PoolFormat format_of(const mlx::core::Dtype& dtype) {
  switch (dtype) {
    case mlx::core::int8:
      return PoolFormat::int8;
    case mlx::core::uint32:
      return PoolFormat::int4;
    case mlx::core::uint8:
      return PoolFormat::fp8;
    default:
      return PoolFormat::plain;
  }
}

int last_extent(const mlx::core::Dtype& dtype, int head_dim) {
  auto format = format_of(dtype);
  int item_size = int(mlx::core::size_of(dtype));
  return (code_bytes(format, head_dim, item_size) + tail_bytes(format, head_dim)) / item_size;
}

PoolLayout layout_of(const mlx::core::array& pool) {
  auto format = format_of(pool.dtype());
  int last = pool.shape(3);
  int item_size = int(pool.itemsize());
  int head_dim = format == PoolFormat::plain ? last : head_dim_of(format, last * item_size);
  return {format, pool.shape(0), pool.shape(1), pool.shape(2), head_dim, item_size};
}

}  // namespace mlx_paged
