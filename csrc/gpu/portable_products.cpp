// Copyright © 2026 the mlx_paged authors. Apache-2.0.

#include "portable_products.h"

#include <bit>
#include <string>
#include <utility>

#include "../../metal/kernel_table.h"
#include "../dense.h"

namespace mlx_paged {

namespace {

constexpr int kUnitCodes = 32;  // UNIT_CODES of metal/quantized_weights.h

// The part of a kernel's host name between its function and its rows.
std::string suffix_of(DType dtype, const std::optional<WeightCodes>& codes) {
  std::string suffix = std::string("_") + name_of(dtype);
  if (codes) {
    suffix += std::string("_") + name_of(codes->format) + "_" + std::to_string(codes->bits);
  }
  return suffix;
}

}  // namespace

std::optional<std::string> unsupported_weight(const std::optional<WeightCodes>& codes, int64_t k) {
  if (!codes || k % kUnitCodes == 0) {
    return std::nullopt;
  }
  return "quantized weights of " + std::to_string(k) + " columns, no multiple of 32";
}

int group_shift_of(const std::optional<WeightCodes>& codes) {
  return codes && codes->group_size > kUnitCodes
             ? std::countr_zero(unsigned(codes->group_size / kUnitCodes))
             : 0;
}

int product_rows_of(int num_rows) {
  return num_rows == 1 ? 1 : num_rows <= 4 ? 4 : paged::PRODUCT_ROWS;
}

int product_columns_of(int rows) {
  return paged::PRODUCT_SIMD_GROUPS * paged::product_columns(rows);
}

KernelName product_kernel(
    const char* function, DType dtype, const std::optional<WeightCodes>& codes, int rows) {
  return kernel_named(function + suffix_of(dtype, codes) + "_m" + std::to_string(rows));
}

KernelName lookup_kernel(DType dtype, const WeightCodes& codes) {
  return kernel_named("lookup_rows" + suffix_of(dtype, codes));
}

int lookup_units(int64_t k) {
  return int(k / kUnitCodes);
}

void bind_weight(
    Launch& launch, const ProductStep::Part& part, const std::vector<StepOperand>& operands) {
  int scales = part.scales >= 0 ? part.scales : part.weight;
  for (int operand : {part.weight, scales, part.biases >= 0 ? part.biases : scales}) {
    launch.buffers.push_back({operand, Access::read, operands[operand].bytes});
  }
}

std::vector<Launch> portable_product_launches(
    const ProductStep& step, const std::vector<StepOperand>& operands) {
  if (auto reason = unsupported_weight(step.codes, step.k)) {
    throw UnsupportedGraph(*reason);
  }
  std::vector<Launch> launches;
  if (step.adapters) {
    launches.push_back(step.adapters->down);
  }
  auto bind = [&](Launch& launch, int operand, Access access) {
    launch.buffers.push_back({operand, access, operands[operand].bytes});
  };
  int rows = product_rows_of(step.num_rows);
  for (size_t i = 0; i < step.parts.size(); i++) {
    const auto& part = step.parts[i];
    paged::ProductParams params{
        step.num_rows,
        part.n,
        step.k,
        step.x_stride,
        part.bias >= 0,
        step.residual >= 0,
        group_shift_of(step.codes)};
    Launch launch;
    launch.kernel = product_kernel("product_rows", step.dtype, step.codes, rows);
    bind(launch, step.x, Access::read);
    bind_weight(launch, part, operands);
    bind(launch, part.bias >= 0 ? part.bias : part.weight, Access::read);
    bind(launch, step.residual >= 0 ? step.residual : step.x, Access::read);
    bind(launch, part.out, Access::write);
    launch.constants = bytes_of(params);
    launch.grid = {div_up(part.n, product_columns_of(rows)), div_up(step.num_rows, rows), 1};
    launch.threadgroup = {32 * paged::PRODUCT_SIMD_GROUPS, 1, 1};
    launch.beside_previous = i > 0;
    launches.push_back(std::move(launch));
  }
  for (auto& launch : launches_after_products(step, operands)) {
    launches.push_back(std::move(launch));
  }
  return launches;
}

bool serves_quantized_linear(const Arrays& in, const WeightCodes& codes) {
  const auto& x = in[0];
  int64_t k = int64_t(in[1].shape(1)) * 32 / codes.bits;
  if (x.ndim() > 4 || k == 0 || unsupported_weight(codes, k)) {
    return false;
  }
  bool is_affine = codes.format == WeightFormat::affine;
  for (size_t i = 1; i < in.size(); i++) {
    auto expected = i == 1 ? mx::uint32 : i == 2 && !is_affine ? mx::uint8 : x.dtype();
    if (in[i].dtype() != expected || !is_dense(in[i]) || in[i].offset() % kChunkBytes != 0) {
      return false;
    }
  }
  return true;
}

}  // namespace mlx_paged
