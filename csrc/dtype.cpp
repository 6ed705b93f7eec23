// Copyright © 2026 the mlx_paged authors. Apache-2.0.

#include "dtype.h"

#include <stdexcept>

#include "mlx/dtype.h"

namespace mlx_paged {

namespace {

struct Entry {
  DType dtype;
  const char* name;
  mlx::core::Dtype mlx;
};

#define ENTRY(unused, name, type) {DType::name, #name, mlx::core::name},
const Entry kEntries[] = {PAGED_FOR_EACH_DTYPE(ENTRY, unused)};

const Entry* find(const mlx::core::Dtype& dtype) {
  for (const auto& entry : kEntries) {
    if (entry.mlx == dtype) {
      return &entry;
    }
  }
  return nullptr;
}

}  // namespace

const char* name_of(DType dtype) {
  return kEntries[int(dtype)].name;
}

bool is_supported(const mlx::core::Dtype& dtype) {
  return find(dtype) != nullptr;
}

DType dtype_of(const mlx::core::Dtype& dtype) {
  const auto* entry = find(dtype);
  if (!entry) {
    throw std::logic_error("[mlx_paged] no kernel takes arrays of this dtype");
  }
  return entry->dtype;
}

}  // namespace mlx_paged
