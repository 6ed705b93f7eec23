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

void add_lora(const LoraShape& shape, const LoraRow* rows, int num_rows) {
  uint64_t done = 0;  // a bit for each row
  for (int first = 0; first < num_rows; first++) {
    if (done >> first & 1) {
      continue;
    }
    int adapter = rows[first].adapter;
    if (adapter < 0 || adapter >= shape.num_adapters) {
      std::copy_n(rows[first].base, shape.n, rows[first].out);
      continue;
    }
    LoraArgs args;
    args.dtype = shape.dtype;
    args.num_rows = 0;
    for (int i = first; i < num_rows && args.num_rows < kLoraRows; i++) {
      if (rows[i].adapter == adapter && !(done >> i & 1)) {
        args.base[args.num_rows] = rows[i].base;
        args.x[args.num_rows] = rows[i].x;
        args.out[args.num_rows++] = rows[i].out;
        done |= uint64_t(1) << i;
      }
    }
    args.a = rows[first].a + int64_t(adapter) * shape.rank * shape.k * shape.item_size;
    args.b = rows[first].b + int64_t(adapter) * shape.rank * shape.n * shape.item_size;
    args.rank = shape.rank;
    args.k = shape.k;
    args.n = shape.n;
    args.hidden = thread_scratch(args.num_rows * shape.rank);
    kernels().layer.lora(args);
  }
}

}  // namespace mlx_paged::cpu
