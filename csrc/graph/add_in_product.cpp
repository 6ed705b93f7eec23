// Copyright © 2026 the mlx_paged authors. Apache-2.0.

#include "../dense.h"
#include "mlx/ops.h"
#include "passes.h"

namespace mlx_paged {

namespace {

bool is(const mx::array& a, Op op) {
  return is_pending(a) && op_of(a) == op;
}

mx::array without_reshapes(mx::array a) {
  while (is_pending(a) && is_reshape(op_of(a))) {
    a = mx::array(a.inputs()[0]);
  }
  return a;
}

}  // namespace

std::optional<mx::array> add_in_product(const mx::array& sum) {
  if (!is(sum, Op::add) || sum.ndim() < 2) {
    return std::nullopt;
  }
  for (int side : {1, 0}) {
    const mx::array product = without_reshapes(sum.inputs()[side]);
    const mx::array& x = sum.inputs()[1 - side];
    if (!is(product, Op::matmul) || product.ndim() != 2 || product.dtype() != sum.dtype() ||
        x.dtype() != sum.dtype() || x.size() != sum.size() || product.size() != sum.size() ||
        product.shape(1) != sum.shape(-1) || is(x, Op::broadcast)) {
      continue;
    }
    const auto stream = sum.primitive().stream();
    auto rows = mx::reshape(x, product.shape(), stream);
    auto added =
        mx::addmm(std::move(rows), product.inputs()[0], product.inputs()[1], 1.0f, 1.0f, stream);
    return mx::reshape(added, sum.shape(), stream);
  }
  return std::nullopt;
}

}  // namespace mlx_paged
