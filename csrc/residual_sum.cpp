// Copyright © 2026 the mlx_paged authors. Apache-2.0.

#include "residual_sum.h"

#include <cstring>
#include <utility>

#include "dense.h"
#include "mlx/ops.h"
#include "mlx/primitives.h"

namespace mlx_paged {

namespace {

bool is(const mx::array& a, const char* name) {
  return is_pending(a) && std::strcmp(a.primitive().name(), name) == 0;
}

// The array behind views that keep its elements in order.
mx::array without_views(mx::array a) {
  while (is(a, "Unflatten") || is(a, "Reshape") || is(a, "ExpandDims") || is(a, "Squeeze")) {
    a = mx::array(a.inputs()[0]);
  }
  return a;
}

}  // namespace

bool add_in_product(mx::array& sum) {
  if (!is(sum, "Add") || sum.ndim() < 2) {
    return false;
  }
  for (int i : {1, 0}) {
    const mx::array product = without_views(sum.inputs()[i]);
    const mx::array& x = sum.inputs()[1 - i];
    if (!is(product, "Matmul") || product.ndim() != 2 || product.dtype() != sum.dtype() ||
        x.dtype() != sum.dtype() || product.size() != sum.size() ||
        product.shape(1) != sum.shape(-1) || is(x, "Broadcast")) {
      continue;
    }
    const auto stream = sum.primitive().stream();
    auto rows = mx::reshape(x, product.shape(), stream);
    auto added =
        mx::addmm(std::move(rows), product.inputs()[0], product.inputs()[1], 1.0f, 1.0f, stream);
    sum.overwrite_descriptor(mx::reshape(added, sum.shape(), stream));
    return true;
  }
  return false;
}

}  // namespace mlx_paged
