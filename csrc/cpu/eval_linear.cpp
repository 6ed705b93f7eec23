// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// eval_cpu of x @ weight.T + bias, of weights in each of their formats.

#include <dlfcn.h>

#include <algorithm>
#include <cmath>
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
  constexpr int64_t kSlabBytes = 32 << 20;
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

cpu::WeightView quantized_view(
    const mx::array* in, cpu::WeightFormat format, int bits, int group_size) {
  cpu::WeightView w;
  w.data = in[0].data<void>();
  w.scales = in[1].data<void>();
  w.n = in[0].shape(0);
  w.k = int(int64_t(in[0].shape(1)) * 32 / bits);
  w.format = format;
  w.bits = bits;
  w.group_size = group_size;
  w.row_bytes = int64_t(in[0].shape(1)) * 4;
  if (format == cpu::WeightFormat::affine) {
    w.dtype = dtype_of(in[1].dtype());
    w.biases = in[2].data<void>();
  }
  return w;
}

}  // namespace

cpu::WeightView Linear::weights(const mx::array& weight) {
  cpu::WeightView w;
  w.data = weight.data<void>();
  w.n = weight.shape(0);
  w.k = weight.shape(1);
  w.dtype = dtype_of(weight.dtype());
  w.bits = int(weight.itemsize()) * 8;
  w.row_bytes = int64_t(w.k) * weight.itemsize();
  return w;
}

void Linear::eval_cpu(const Arrays& inputs, Arrays& out) {
  auto& encoder = mx::cpu::get_command_encoder(stream());
  auto in = cpu::dense_inputs(inputs, 0, encoder);
  out[0].set_data(mx::allocator::malloc(out[0].nbytes()));
  encoder.dispatch([m = int(in[0].size() / in[1].shape(1)), x = in[0].data<float>(),
                    weights = weights(in[1]), bias = in.size() > 2 ? in[2].data<float>() : nullptr,
                    out = out[0].data<float>()] { multiply(x, weights, bias, out, m); });
}

cpu::WeightView QuantizedLinear::weights(const Arrays& in) const {
  return quantized_view(&in[1], codes_.format, codes_.bits, codes_.group_size);
}

void QuantizedLinear::eval_cpu(const Arrays& inputs, Arrays& out) {
  auto& encoder = mx::cpu::get_command_encoder(stream());
  auto in = cpu::dense_inputs(inputs, 0, encoder);
  out[0].set_data(mx::allocator::malloc(out[0].nbytes()));
  auto w = weights(in);
  size_t bias = w.biases ? 4 : 3;
  encoder.dispatch([m = int(in[0].size() / w.k), x = in[0].data<float>(), w,
                    bias = in.size() > bias ? in[bias].data<float>() : nullptr,
                    out = out[0].data<float>()] { multiply(x, w, bias, out, m); });
}

cpu::WeightView Lookup::weights(const Arrays& in) const {
  return format_ == cpu::WeightFormat::dense ? Linear::weights(in[1])
                                             : quantized_view(&in[1], format_, bits_, group_size_);
}

void Lookup::read(const cpu::WeightView& weights, int64_t id, float* out) {
  id += id < 0 ? weights.n : 0;
  if (id < 0 || id >= weights.n) {
    std::fill_n(out, weights.k, std::nanf(""));
    return;
  }
  cpu::kernels().product.unpack(weights, id, id + 1, out);
}

void Lookup::eval_cpu(const Arrays& inputs, Arrays& out) {
  auto& encoder = mx::cpu::get_command_encoder(stream());
  auto in = cpu::dense_inputs(inputs, 0, encoder);
  out[0].set_data(mx::allocator::malloc(out[0].nbytes()));
  auto w = weights(in);
  encoder.dispatch(
      [size = int64_t(in[0].size()), ids = in[0].data<int32_t>(), w, out = out[0].data<float>()] {
        cpu::for_ranges(size, w.k * int64_t(sizeof(float)), [&](int64_t begin, int64_t end) {
          for (int64_t i = begin; i < end; i++) {
            read(w, ids[i], out + i * w.k);
          }
        });
      });
}

}  // namespace mlx_paged
