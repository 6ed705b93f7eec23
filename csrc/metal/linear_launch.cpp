// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Quantized linear layers of few rows on Apple GPUs as separate primitives. A row has the bits that
// it has in whole steps.

#include "../dense.h"
#include "../gpu.h"
#include "../gpu/portable_products.h"
#include "../primitives.h"
#include "../rejected_kernels.h"

namespace mlx_paged {

namespace {

int64_t rows_of(const mx::array& x) {
  return x.shape(-1) == 0 ? 0 : int64_t(x.size()) / x.shape(-1);
}

}  // namespace

// Outside of programs only where calibration found the kernel right and no slower than MLX's.
bool QuantizedLinear::served_on_gpu(const Arrays& in, const WeightCodes& codes, bool for_program) {
  if (!serves_quantized_linear(in, codes) || for_program) {
    return for_program && serves_quantized_linear(in, codes);
  }
  int64_t num_rows = rows_of(in[0]);
  if (num_rows == 0 || num_rows > paged::PRODUCT_ROWS) {
    return false;
  }
  auto kernel = product_kernel(
      "product_rows", dtype_of(in[0].dtype()), codes, product_rows_of(int(num_rows)));
  return allows_product(kernel.host_name) && !is_rejected(kernel.host_name);
}

void QuantizedLinear::eval_gpu(const Arrays& in, Arrays& out) {
  gpu::allocate(out[0], stream());
  auto inputs = in;
  inputs[0] = gpu::readable(in[0], stream());
  ProductStep step{};
  step.x = 0;
  step.num_rows = int(rows_of(in[0]));
  step.k = step.x_stride = in[0].shape(-1);
  step.codes = codes_;
  step.dtype = dtype_of(in[0].dtype());
  int bias = has_biases() ? 4 : 3;
  ProductStep::Part part{};
  part.weight = 1;
  part.scales = 2;
  part.biases = has_biases() ? 3 : -1;
  part.bias = int(in.size()) > bias ? bias : -1;
  part.out = int(in.size());
  part.n = in[1].shape(0);
  step.parts.push_back(part);
  std::vector<StepOperand> operands;
  for (const Arrays* arrays :
       {&const_cast<const Arrays&>(inputs), &const_cast<const Arrays&>(out)}) {
    for (const auto& a : *arrays) {
      StepOperand operand{StepOperand::Kind::input};
      operand.bytes = a.nbytes();
      operands.push_back(operand);
    }
  }
  gpu::encode({portable_product_launches(step, operands), {}}, inputs, out, {}, stream());
}

}  // namespace mlx_paged
