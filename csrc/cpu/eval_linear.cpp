// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// eval_cpu of x @ weight.T + bias.

#include <dlfcn.h>

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

void Linear::eval_cpu(const Arrays& inputs, Arrays& out) {
  auto& encoder = mx::cpu::get_command_encoder(stream());
  auto in = cpu::dense_inputs(inputs, 0, encoder);
  out[0].set_data(mx::allocator::malloc(out[0].nbytes()));
  int k = in[1].shape(1);
  int n = in[1].shape(0);
  int m = int(in[0].size() / k);
  encoder.dispatch([m, n, k, x = in[0].data<float>(), weight = in[1].data<float>(),
                    bias = in.size() > 2 ? in[2].data<float>() : nullptr,
                    out = out[0].data<float>()] {
    constexpr int kRowMajor = 101;
    constexpr int kNoTranspose = 111;
    constexpr int kTranspose = 112;
    if (m == 0) {
      return;
    }
    const auto& product = cpu::kernels().product;
    auto weights = cpu::WeightView::float32(weight, n, k, k);
    if (m <= product.most_rows(weights)) {
      cpu::for_product_pieces(m, n, k, sizeof(float), n, [&](int64_t begin, int64_t end) {
        product.few_rows({x, weights, out, m, k, n}, begin, end);
      });
    } else {
      cpu::find_sgemm()(
          kRowMajor, kNoTranspose, kTranspose, m, n, k, 1, x, k, weight, k, 0, out, n);
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
  });
}

}  // namespace mlx_paged
