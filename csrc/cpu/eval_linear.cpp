// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// eval_cpu of x @ weight.T + bias, of weights in each of their formats.

#include <dlfcn.h>

#include <algorithm>
#include <vector>

#include "../primitives.h"
#include "blas.h"
#include "dense.h"
#include "eval.h"
#include "kernels.h"
#include "mlx/allocator.h"
#include "mlx/backend/cpu/encoder.h"
#include "product_pieces.h"

namespace mlx_paged {

cpu::Sgemm cpu::find_sgemm() {
  static const auto sgemm = reinterpret_cast<Sgemm>(dlsym(RTLD_DEFAULT, "cblas_sgemm"));
  return sgemm;
}

namespace {

void sgemm(int m, int n, int k, const float* x, const float* weight, float* out, int ldc) {
  constexpr int kRowMajor = 101;
  constexpr int kNoTranspose = 111;
  constexpr int kTranspose = 112;
  cpu::find_sgemm()(kRowMajor, kNoTranspose, kTranspose, m, n, k, 1, x, k, weight, k, 0, out, ldc);
}

// Of many rows: some of the weights at a time are unpacked, into what the processor's caches hold,
// and multiplied by all of x.
void multiply_many(const float* x, const cpu::WeightView& weights, float* out, int m) {
  constexpr int64_t kSlabBytes = 4 << 20;
  constexpr int kAlign = 16;
  constexpr int kAtOnce = 8;  // rows of weights
  int64_t fit = kSlabBytes / (int64_t(weights.k) * int64_t(sizeof(float)));
  int columns = int(std::clamp<int64_t>(fit / kAlign * kAlign, kAlign, weights.n + kAlign));
  // Its pages are not made anew for every product.
  thread_local std::vector<float> slab;
  slab.resize(std::max(slab.size(), size_t(columns) * weights.k));
  for (int begin = 0; begin < weights.n; begin += columns) {
    int count = std::min(columns, weights.n - begin);
    cpu::parallel_for((count + kAtOnce - 1) / kAtOnce, [&, to = slab.data()](int task, int) {
      int64_t row = int64_t(task) * kAtOnce;
      cpu::kernels().product.unpack(
          weights, begin + row, begin + std::min<int64_t>(row + kAtOnce, count),
          to + row * weights.k);
    });
    sgemm(m, count, weights.k, x, slab.data(), out + begin, weights.n);
  }
}

// x [m, k] times the rows of weights, plus bias where there is one.
void multiply(
    const float* x, const cpu::WeightView& weights, const float* bias, float* out, int m) {
  if (m == 0) {
    return;
  }
  int n = weights.n;
  int k = weights.k;
  const auto& product = cpu::kernels().product;
  bool is_float = weights.format == cpu::WeightFormat::dense && weights.dtype == DType::float32;
  if (m <= product.most_rows(weights) || !cpu::find_sgemm()) {
    cpu::for_product_pieces(m, n, k, weights.bits, n, [&](int64_t begin, int64_t end) {
      product.few_rows({x, weights, out, m, k, n}, begin, end);
    });
  } else if (is_float) {
    sgemm(m, n, k, x, static_cast<const float*>(weights.data), out, n);
  } else {
    multiply_many(x, weights, out, m);
  }
  if (!bias) {
    return;
  }
  cpu::for_ranges(m, n * int64_t(sizeof(float)), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++) {
      for (int i = 0; i < n; i++) {
        out[row * n + i] += bias[i];
      }
    }
  });
}

cpu::WeightView dense_view(const mx::array& weight) {
  cpu::WeightView w;
  w.data = weight.data<void>();
  w.n = weight.shape(0);
  w.k = weight.shape(1);
  w.dtype = dtype_of(weight.dtype());
  w.bits = int(weight.itemsize()) * 8;
  w.row_bytes = int64_t(w.k) * weight.itemsize();
  return w;
}

}  // namespace

void Linear::eval_cpu(const Arrays& inputs, Arrays& out) {
  auto& encoder = mx::cpu::get_command_encoder(stream());
  auto in = cpu::dense_inputs(inputs, 0, encoder);
  out[0].set_data(mx::allocator::malloc(out[0].nbytes()));
  encoder.dispatch([m = int(in[0].size() / in[1].shape(1)), x = in[0].data<float>(),
                    weights = dense_view(in[1]),
                    bias = in.size() > 2 ? in[2].data<float>() : nullptr,
                    out = out[0].data<float>()] { multiply(x, weights, bias, out, m); });
}

void QuantizedLinear::eval_cpu(const Arrays& inputs, Arrays& out) {
  auto& encoder = mx::cpu::get_command_encoder(stream());
  auto in = cpu::dense_inputs(inputs, 0, encoder);
  out[0].set_data(mx::allocator::malloc(out[0].nbytes()));
  cpu::WeightView w;
  w.data = in[1].data<void>();
  w.scales = in[2].data<void>();
  w.n = in[1].shape(0);
  w.k = in[0].shape(-1);
  w.format = format_;
  w.bits = bits_;
  w.group_size = group_size_;
  w.row_bytes = int64_t(in[1].shape(1)) * 4;
  size_t next = 3;
  if (format_ == cpu::WeightFormat::affine) {
    w.dtype = dtype_of(in[2].dtype());
    w.biases = in[next++].data<void>();
  }
  encoder.dispatch([m = int(in[0].size() / w.k), x = in[0].data<float>(), w,
                    bias = in.size() > next ? in[next].data<float>() : nullptr,
                    out = out[0].data<float>()] { multiply(x, w, bias, out, m); });
}

}  // namespace mlx_paged
