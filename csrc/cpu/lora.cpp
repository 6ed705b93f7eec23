// Copyright © 2026 the mlx_paged authors. Apache-2.0.

#include "lora.h"

#include "kernels.h"

namespace mlx_paged::cpu {

namespace {

bool has_adapter(const LoraRows& rows, int64_t row) {
  return rows.adapters[row] >= 0 && rows.adapters[row] < rows.shape.num_adapters;
}

// Calls body(first row, arguments, adapter, adapter of the next call) for runs of rows with one
// adapter. The engine makes them neighbors.
template <typename Body>
void for_adapters(const LoraRows& rows, const Body& body) {
  const auto& s = rows.shape;
  for (int64_t row = 0; row < rows.num_rows;) {
    if (!has_adapter(rows, row)) {
      row++;
      continue;
    }
    LoraArgs args{};
    args.dtype = s.dtype;
    args.rank = s.rank;
    args.k = s.k;
    args.n = s.n;
    int64_t first = row;
    int adapter = rows.adapters[row];
    for (; row < rows.num_rows && args.num_rows < kLoraRows; row++) {
      if (rows.adapters[row] != adapter) {
        break;
      }
      args.hidden[args.num_rows++] = rows.hidden + row * s.rank;
    }
    bool has_next = row < rows.num_rows && has_adapter(rows, row);
    body(first, args, adapter, has_next ? rows.adapters[row] : adapter);
  }
}

const char* up_of(const LoraRows& rows, int adapter, int begin) {
  const auto& s = rows.shape;
  return rows.b + (int64_t(adapter) * s.rank * s.n + begin) * s.item_size;
}

}  // namespace

LoraShape lora_shape(const Arrays& in) {
  const auto& a = in[Lora::kA];
  const auto& b = in[Lora::kB];
  return {a.shape(0), a.shape(1),          a.shape(2),
          b.shape(2), dtype_of(a.dtype()), int64_t(a.itemsize())};
}

void lora_down(const LoraRows& rows, const float* x, int64_t x_stride, int begin, int end) {
  int64_t bytes = int64_t(rows.shape.rank) * rows.shape.k * rows.shape.item_size;
  for_adapters(rows, [&](int64_t first, LoraArgs& args, int adapter, int next) {
    args.a = rows.a + adapter * bytes;
    args.next = rows.a + next * bytes;
    for (int i = 0; i < args.num_rows; i++) {
      args.x[i] = x + (first + i) * x_stride;
    }
    kernels().layer.lora_down(args, begin, end);
  });
}

void lora_up(const LoraRows& rows, float* out, int64_t out_stride, int begin, int end) {
  for_adapters(rows, [&](int64_t first, LoraArgs& args, int adapter, int next) {
    args.b = up_of(rows, adapter, begin);
    args.next = up_of(rows, next, begin);
    for (int i = 0; i < args.num_rows; i++) {
      args.out[i] = out + (first + i) * out_stride;
    }
    kernels().layer.lora_up(args, 0, end - begin);
  });
}

void fetch_lora_up(const LoraRows& rows, int begin, int end) {
  constexpr int64_t kLine = 64;
  for (int64_t i = 0; i < rows.num_rows; i++) {
    if (!has_adapter(rows, i)) {
      continue;
    }
    for (int r = 0; r < rows.shape.rank; r++) {
      const char* from =
          up_of(rows, rows.adapters[i], begin) + int64_t(r) * rows.shape.n * rows.shape.item_size;
      for (int64_t at = 0; at < (end - begin) * rows.shape.item_size; at += kLine) {
        __builtin_prefetch(from + at, 0, 2);
      }
    }
    return;
  }
}

}  // namespace mlx_paged::cpu
