// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Linear layers and experts as separate primitives.

#include <cuda_runtime.h>

#include <algorithm>

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

namespace {

// A product whose part `i` has its arrays in `in` from `first` on, one part after another.
cuda::SortedProduct sorted_product(
    const Arrays& in, size_t first, size_t num_parts, const WeightCodes& codes, bool has_bias) {
  cuda::SortedProduct product{};
  const auto& weight = in[first];
  product.num_experts = weight.shape(0);
  product.n = weight.shape(1);
  product.k = int(int64_t(weight.shape(2)) * 32 / codes.bits);
  product.dtype = dtype_of(in[0].dtype());
  product.codes = codes;
  const bool has_biases = codes.format == WeightFormat::affine;
  int at = int(first);
  for (size_t i = 0; i < num_parts; i++) {
    product.parts.push_back(
        {at, at + 1, has_biases ? at + 2 : at + 1, has_bias ? at + 2 + has_biases : -1});
    at += 2 + has_biases + has_bias;
  }
  return product;
}

// True if kernels can read weights from in[first] on, which belong to x.
bool are_readable(const Arrays& in, size_t first) {
  auto dtype = in[0].dtype();
  return (dtype == mx::float16 || dtype == mx::bfloat16) &&
         std::all_of(in.begin() + first, in.end(), [&](const mx::array& a) {
           bool is_codes = a.dtype() == mx::uint32 || a.dtype() == mx::uint8;
           return (is_codes || a.dtype() == dtype) && is_dense(a) && a.offset() % 16 == 0;
         });
}

}  // namespace

bool SortedExpertLinear::served_on_gpu(const Arrays& in, const WeightCodes& codes, bool has_bias) {
  auto product = sorted_product(in, kWeights, 1, codes, has_bias);
  product.num_rows = in[0].shape(0);
  return are_readable(in, kWeights) && cuda::serves_sorted(product, cuda::tma_kernels());
}

void SortedExpertLinear::eval_gpu(const Arrays& in, Arrays& out) {
  gpu::allocate(out[0], stream());
  auto inputs = in;
  for (int i : {0, 1}) {
    inputs[i] = gpu::readable(in[i], stream());
  }
  auto product = sorted_product(in, kWeights, 1, codes_, has_bias_);
  product.num_rows = in[0].shape(0);
  product.out = int(in.size());
  product.items = product.out + 1;
  const auto items = cuda::SortedItems::of(product);
  LaunchList list;
  list.launches = {
      cuda::sorted_items_launch(items, 1, product.items), cuda::sorted_launch(product)};
  list.workspaces = {items.bytes()};
  gpu::encode(list, inputs, out, {}, stream());
}

namespace {

struct GluProducts {
  cuda::SortedProduct gated;  // gate and up
  cuda::SortedProduct down;
};

GluProducts glu_products(const Arrays& in, const ExpertGlu::Formats& formats) {
  auto gated = sorted_product(in, ExpertGlu::kWeights, 2, formats.gate, formats.has_bias);
  const auto& up = gated.parts[1];
  size_t first = 1 + std::max({up.scales, up.biases, up.bias});
  auto down = sorted_product(in, first, 1, formats.down, formats.down_has_bias);
  gated.num_rows = down.num_rows = int(in[1].size());
  return {std::move(gated), std::move(down)};
}

}  // namespace

bool ExpertGlu::served_on_gpu(const Arrays& in, const Formats& formats) {
  auto [gated, down] = glu_products(in, formats);
  // Both products have the same items.
  auto item_rows = [](const cuda::SortedProduct& of) {
    return cuda::SortedItems::of(of).item_rows;
  };
  return are_readable(in, kWeights) && cuda::serves_sorted(gated, cuda::tma_kernels()) &&
         cuda::serves_sorted(down, cuda::tma_kernels()) && item_rows(gated) == item_rows(down);
}

void ExpertGlu::eval_gpu(const Arrays& in, Arrays& out) {
  gpu::allocate(out[0], stream());
  auto inputs = in;
  for (int i = 0; i < kWeights; i++) {
    inputs[i] = gpu::readable(in[i], stream());
  }
  auto [gated, down] = glu_products(in, formats_);
  const int num_pairs = gated.num_rows;
  const int top_k = num_pairs / in[0].shape(0);
  const auto row_bytes = [&](int columns) { return uint64_t(num_pairs) * columns * 2; };
  const int result = int(in.size());
  const int items_at = result + 1;
  const int rows_at = result + 2;
  const auto items = cuda::SortedItems::of(gated);
  gated.x = rows_at;
  gated.out = down.x = result + 3;
  gated.items = down.items = items_at;
  gated.x_is_ordered = down.x_is_ordered = true;
  gated.out_order = cuda::order_of_sorted(down.codes);
  down.out = result;
  down.pairs = kPairs;
  LaunchList list;
  list.launches = {
      cuda::sorted_items_launch(items, kExperts, items_at),
      cuda::sorted_rows_launch(
          {num_pairs, top_k, gated.k, gated.k}, cuda::order_of_sorted(gated.codes), 0, kPairs,
          rows_at),
      cuda::sorted_launch(gated), cuda::sorted_launch(down)};
  list.workspaces = {items.bytes(), row_bytes(gated.k), row_bytes(down.k)};
  gpu::encode(list, inputs, out, {}, stream());
}

}  // namespace mlx_paged
