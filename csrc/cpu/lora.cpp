// Copyright © 2026 the mlx_paged authors. Apache-2.0.

#include "lora.h"

#include <algorithm>

#include "kernels.h"
#include "scratch.h"

namespace mlx_paged::cpu {

LoraShape lora_shape(const Arrays& in) {
  const auto& a = in[Lora::kA];
  const auto& b = in[Lora::kB];
  return {a.shape(0), a.shape(1),          a.shape(2),
          b.shape(1), dtype_of(a.dtype()), int64_t(a.itemsize())};
}

namespace {

// The matrix of one adapter in the stacked matrices of all.
WeightView matrix_of(const LoraShape& shape, const char* all, int adapter, int n, int k) {
  WeightView w;
  w.data = all + int64_t(adapter) * n * k * shape.item_size;
  w.n = n;
  w.k = k;
  w.dtype = shape.dtype;
  w.bits = int(shape.item_size) * 8;
  w.row_bytes = k * shape.item_size;
  return w;
}

}  // namespace

void add_lora(const LoraShape& shape, const LoraRow& row) {
  if (row.adapter < 0 || row.adapter >= shape.num_adapters) {
    std::copy_n(row.base, shape.n, row.out);
    return;
  }
  float* hidden = thread_scratch(shape.rank + shape.n);
  float* delta = hidden + shape.rank;
  const auto& multiply = kernels().product.few_rows;
  auto a = matrix_of(shape, row.a, row.adapter, shape.rank, shape.k);
  auto b = matrix_of(shape, row.b, row.adapter, shape.n, shape.rank);
  multiply({row.x, a, hidden, 1, shape.k, shape.rank}, 0, shape.rank);
  multiply({hidden, b, delta, 1, shape.rank, shape.n}, 0, shape.n);
  for (int i = 0; i < shape.n; i++) {
    row.out[i] = row.base[i] + delta[i];
  }
}

}  // namespace mlx_paged::cpu
