// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Linear layers of few rows as separate primitives.

#include <cuda_runtime.h>

#include "../dense.h"
#include "../gpu.h"
#include "../primitives.h"
#include "compiled_kernels.h"
#include "products.h"

namespace mlx_paged::cuda {

namespace {
#ifdef MLX_PAGED_SM90A  // set by cuda.cmake
constexpr bool kHasSm90a = true;
#else
constexpr bool kHasSm90a = false;
#endif
}  // namespace

TmaKernels tma_kernels() {
  static const TmaKernels found = [] {
    // Attributes of the code that the driver chose for this device: compiled code or PTX.
    cudaFuncAttributes kernel;
    auto symbol = find_kernel(stream_kernel(DType::float16, 1, TmaKernels::any));
    if (cudaFuncGetAttributes(&kernel, symbol) != cudaSuccess || kernel.ptxVersion < 90) {
      return TmaKernels::none;
    }
    int device = 0;
    int bytes = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    if (bytes < kQuantizedStreamBytes) {
      return TmaKernels::small;
    }
    return kHasSm90a && kernel.binaryVersion == 90 ? TmaKernels::wgmma : TmaKernels::any;
  }();
  return found;
}

}  // namespace mlx_paged::cuda

namespace mlx_paged {

// Few rows, where the product is bound by reading the weight.
bool Linear::served_on_gpu(
    const mx::array& x, const mx::array& weight, const std::optional<mx::array>& bias) {
  auto dtype = x.dtype();
  int n = weight.shape(0);
  int k = weight.shape(1);
  bool is_small = k > 0 && x.size() <= size_t(cuda::kLinearMaxRows) * k;
  return (dtype == mx::float16 || dtype == mx::bfloat16) && weight.dtype() == dtype &&
         x.ndim() <= 4 && is_small &&
         cuda::serves_product(int(x.size() / k), n, k, false, cuda::tma_kernels()) &&
         is_dense(weight) && weight.offset() % 16 == 0 &&
         (!bias || (bias->dtype() == dtype && is_dense(*bias)));
}

void Linear::eval_gpu(const Arrays& in, Arrays& out) {
  gpu::allocate(out[0], stream());
  auto inputs = in;
  inputs[0] = gpu::readable(in[0], stream());
  const auto& weight = in[1];
  bool has_bias = in.size() > 2;
  int num_rows = int(in[0].size() / weight.shape(1));
  cuda::LinearParams params{};
  params.num_rows = num_rows;
  params.k = params.x_stride = weight.shape(1);
  params.num_weights = 1;
  params.n[0] = weight.shape(0);
  params.has_bias[0] = has_bias;
  // A kernel without bias does not read it, but the argument must still be a buffer.
  cuda::LinearOperands operands{};
  operands.parts[0] = {1, has_bias ? 2 : 1, int(in.size())};
  auto launch = cuda::linear_launch(params, dtype_of(in[0].dtype()), operands, cuda::tma_kernels());
  gpu::encode({{launch}, {}}, inputs, out, {}, stream());
}

bool QuantizedLinear::served_on_gpu(const Arrays& in, const WeightCodes& codes, bool) {
  const auto& x = in[0];
  const auto& weight = in[1];
  auto dtype = x.dtype();
  bool is_affine = codes.format == WeightFormat::affine;
  int64_t k = int64_t(weight.shape(1)) * 32 / codes.bits;
  bool is_small = k > 0 && x.size() <= size_t(cuda::kQuantizedMaxRows) * k;
  if ((dtype != mx::float16 && dtype != mx::bfloat16) || x.ndim() > 4 || !is_small ||
      !cuda::serves_quantized(
          int(x.size() / k), weight.shape(0), int(k), codes, cuda::tma_kernels())) {
    return false;
  }
  for (size_t i = 1; i < in.size(); i++) {
    auto expected = i == 1 ? mx::uint32 : i == 2 && !is_affine ? mx::uint8 : dtype;
    if (in[i].dtype() != expected || !is_dense(in[i]) || in[i].offset() % 16 != 0) {
      return false;
    }
  }
  return true;
}

void QuantizedLinear::eval_gpu(const Arrays& in, Arrays& out) {
  gpu::allocate(out[0], stream());
  auto inputs = in;
  inputs[0] = gpu::readable(in[0], stream());
  size_t bias = has_biases() ? 4 : 3;
  bool has_bias = in.size() > bias;
  cuda::LinearParams params{};
  params.k = params.x_stride = in[0].shape(-1);
  params.num_rows = int(in[0].size() / params.k);
  params.num_weights = 1;
  params.n[0] = in[1].shape(0);
  params.has_bias[0] = has_bias;
  cuda::LinearOperands operands{};
  operands.parts[0] = {1, has_bias ? int(bias) : 1, int(in.size()), 2, has_biases() ? 3 : 2};
  auto launch = cuda::quantized_launch(
      params, dtype_of(in[0].dtype()), codes_, operands, cuda::tma_kernels());
  gpu::encode({{launch}, {}}, inputs, out, {}, stream());
}

}  // namespace mlx_paged
