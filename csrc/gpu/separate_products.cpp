// Copyright © 2026 the mlx_paged authors. Apache-2.0.

#include "separate_products.h"

#include <algorithm>
#include <limits>

#include "../../metal/kernel_table.h"
#include "../dense.h"
#include "../gpu.h"
#include "../primitives.h"
#include "../rejected_kernels.h"
#include "portable_products.h"

namespace mlx_paged {

namespace {

int64_t rows_of(const mx::array& x) {
  return x.shape(-1) == 0 ? 0 : int64_t(x.size()) / x.shape(-1);
}

bool can_read(const Arrays& in, const std::optional<WeightCodes>& codes) {
  if (codes) {
    return serves_quantized_linear(in, *codes);
  }
  const auto& x = in[0];
  if (x.ndim() > 4 || x.shape(-1) == 0 || x.shape(-1) * x.itemsize() % kChunkBytes != 0) {
    return false;
  }
  for (size_t i = 1; i < in.size(); i++) {
    if (in[i].dtype() != x.dtype() || !is_dense(in[i]) || in[i].offset() % kChunkBytes != 0) {
      return false;
    }
  }
  return true;
}

Launch tensor_launch(
    const ProductStep& step, const std::vector<StepOperand>& operands, int tile_rows) {
  const auto& part = step.parts[0];
  paged::TensorProductParams params{
      step.num_rows, part.n, step.k, part.bias >= 0, group_shift_of(step.codes)};
  Launch launch;
  launch.kernel = separate_product_kernel(step.dtype, step.codes, tile_rows);
  auto bind = [&](int operand, Access access) {
    launch.buffers.push_back({operand, access, operands[operand].bytes});
  };
  bind(step.x, Access::read);
  bind_weight(launch, part, operands);
  bind(part.bias >= 0 ? part.bias : part.weight, Access::read);
  bind(part.out, Access::write);
  launch.constants = bytes_of(params);
  launch.grid = {div_up(part.n, paged::TENSOR_COLUMNS), div_up(step.num_rows, tile_rows), 1};
  launch.threadgroup = {32 * uint32_t(paged::tensor_simd_groups(tile_rows)), 1, 1};
  launch.threadgroup_memory = uint32_t(paged::tensor_scratch(tile_rows));
  return launch;
}

}  // namespace

std::vector<int> separate_product_tiles(
    DType dtype, const std::optional<WeightCodes>& codes, int num_rows) {
  std::vector<int> tiles;
  if (dtype == DType::float32 || gpu::kind() != Gpu::apple) {
    return tiles;
  }
  if (num_rows <= paged::PRODUCT_ROWS) {
    tiles = {product_rows_of(num_rows)};
  } else if (allows_tensor_kernels()) {
    tiles = {128, 64, 32};
  }
  std::erase_if(tiles, [&](int rows) {
    return is_rejected(separate_product_kernel(dtype, codes, rows).host_name);
  });
  return tiles;
}

KernelName separate_product_kernel(
    DType dtype, const std::optional<WeightCodes>& codes, int tile_rows) {
  auto* function = tile_rows > paged::PRODUCT_ROWS ? "tensor_product" : "product_rows";
  return product_kernel(function, dtype, codes, tile_rows);
}

int separate_product_tile(
    const Arrays& in, const std::optional<WeightCodes>& codes, mx::Stream stream) {
  const auto& x = in[0];
  if (!allows_any_product() || !SeparateProduct::runs_on(stream) || x.ndim() == 0 ||
      !is_supported(x.dtype()) || !can_read(in, codes)) {
    return 0;
  }
  int64_t num_rows = rows_of(x);
  if (num_rows == 0 || num_rows > std::numeric_limits<int>::max() || in[1].size() == 0) {
    return 0;
  }
  auto dtype = dtype_of(x.dtype());
  auto tiles = separate_product_tiles(dtype, codes, int(num_rows));
  auto allowed = std::find_if(tiles.begin(), tiles.end(), [&](int rows) {
    auto kernel = separate_product_kernel(dtype, codes, rows);
    return allows_product(kernel.host_name, int(num_rows));
  });
  return allowed == tiles.end() ? 0 : *allowed;
}

LaunchList SeparateProduct::launches(const Arrays& in, const Arrays& out, Gpu) const {
  ProductStep step{};
  step.x = 0;
  step.num_rows = int(rows_of(in[0]));
  step.k = step.x_stride = in[0].shape(-1);
  step.codes = codes_;
  step.dtype = dtype_of(in[0].dtype());
  ProductStep::Part part{};
  part.weight = 1;
  part.scales = codes_ ? 2 : -1;
  part.biases = codes_ && codes_->format == WeightFormat::affine ? 3 : -1;
  int bias = 1 + std::max({part.weight, part.scales, part.biases});
  part.bias = int(in.size()) > bias ? bias : -1;
  part.out = int(in.size());
  part.n = in[1].shape(0);
  step.parts.push_back(part);
  std::vector<StepOperand> operands;
  for (const Arrays* arrays : {&in, &out}) {
    for (const auto& a : *arrays) {
      StepOperand operand{StepOperand::Kind::input};
      operand.bytes = a.nbytes();
      operands.push_back(operand);
    }
  }
  if (tile_rows_ > paged::PRODUCT_ROWS) {
    return {{tensor_launch(step, operands, tile_rows_)}, {}};
  }
  return {portable_product_launches(step, operands), {}};
}

void SeparateProduct::check(const Arrays&) const {}

}  // namespace mlx_paged
