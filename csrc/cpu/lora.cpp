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
          b.shape(2), dtype_of(a.dtype()), int64_t(a.itemsize())};
}

void add_lora(const LoraShape& shape, const LoraRow& row) {
  if (row.adapter < 0 || row.adapter >= shape.num_adapters) {
    std::copy_n(row.base, shape.n, row.out);
    return;
  }
  LoraArgs args;
  args.dtype = shape.dtype;
  args.base = row.base;
  args.x = row.x;
  args.a = row.a + int64_t(row.adapter) * shape.rank * shape.k * shape.item_size;
  args.b = row.b + int64_t(row.adapter) * shape.rank * shape.n * shape.item_size;
  args.rank = shape.rank;
  args.k = shape.k;
  args.n = shape.n;
  args.hidden = thread_scratch(shape.rank);
  args.out = row.out;
  kernels().layer.lora(args);
}

}  // namespace mlx_paged::cpu
