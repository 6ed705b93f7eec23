// Copyright © 2026 the mlx_paged authors. Apache-2.0.
//
// Python entry points of layer operations and sampling: check arguments and build graph nodes.

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings.h"
#include "cpu/blas.h"
#include "cpu/kernels.h"
#include "dense.h"
#include "gpu/separate_products.h"
#include "graph/passes.h"
#include "primitives.h"
#include "validate.h"

namespace mlx_paged {

namespace {

// Names of the activation dtypes that this processor supports.
std::vector<std::string> activations() {
  std::vector<std::string> names{"float32", "int8"};
  if (cpu::kernels().rounded.bfloat.product) {
    names.insert(names.begin() + 1, "bfloat16");
  }
  return names;
}

}  // namespace

Activations activations_named(const Validator& v, const std::string& name) {
  auto names = activations();
  std::string expected;
  for (const auto& known : names) {
    expected += (expected.empty() ? "" : ", ") + known;
  }
  bool is_known = std::find(names.begin(), names.end(), name) != names.end();
  v.require(is_known, "activations", "one of " + expected + " on this processor", name);
  return name == "int8"       ? Activations::int8
         : name == "bfloat16" ? Activations::bfloat16
                              : Activations::float32;
}

namespace {

mx::array rope_rotations(
    const mx::array& positions, const mx::array& inv_freqs, float scale, mx::StreamOrDevice s_) {
  auto s = mx::to_stream(s_);
  Validator v("rope_rotations");
  v.shape(positions, "positions", {-1});
  v.int32(positions, "positions");
  v.shape(inv_freqs, "inv_freqs", {-1});
  v.require(inv_freqs.dtype() == mx::float32, "inv_freqs", "float32", inv_freqs.dtype());
  v.require(std::isfinite(scale), "scale", "finite", scale);
  return mx::array(
      {positions.shape(0), 2, inv_freqs.shape(0)}, mx::float32,
      std::make_shared<RopeRotations>(s, scale), {dense(positions, s), dense(inv_freqs, s)});
}

mx::array rope(
    const mx::array& x, const mx::array& rotations, bool traditional, mx::StreamOrDevice s_) {
  auto s = mx::to_stream(s_);
  Validator v("rope");
  v.shape(x, "x", {-1, -1, 1, -1});
  v.floating(x, "x");
  v.shape(rotations, "rotations", {x.shape(0), 2, -1});
  v.require(rotations.dtype() == mx::float32, "rotations", "float32", rotations.dtype());
  int dims = 2 * rotations.shape(2);
  v.require(
      x.shape(3) >= dims, "head_dim", "at least the " + std::to_string(dims) + " rotated dims",
      x.shape(3));
  return mx::array(
      x.shape(), x.dtype(), std::make_shared<Rope>(s, traditional), {x, dense(rotations, s)});
}

mx::array rms_norm(
    const mx::array& x, const std::optional<mx::array>& weight, float eps, mx::StreamOrDevice s_) {
  auto s = mx::to_stream(s_);
  Validator v("rms_norm");
  v.require(x.ndim() > 0, "x", "an array with at least one axis", "a scalar");
  v.floating(x, "x");
  v.require(std::isfinite(eps) && eps >= 0, "eps", "finite and at least 0", eps);
  Arrays inputs{dense(x, s)};
  if (weight) {
    v.shape(*weight, "weight", {x.shape(-1)});
    v.same_dtype(*weight, "weight", x, "x");
    inputs.push_back(dense(*weight, s));
  }
  return mx::array(x.shape(), x.dtype(), std::make_shared<RmsNorm>(s, eps), std::move(inputs));
}

mx::array silu_mul(const mx::array& gate, const mx::array& x, mx::StreamOrDevice s_) {
  auto s = mx::to_stream(s_);
  Validator v("silu_mul");
  v.floating(gate, "gate");
  v.same_dtype(x, "x", gate, "gate");
  v.same_shape(x, "x", gate, "gate");
  return mx::array(
      gate.shape(), gate.dtype(), std::make_shared<SiluMul>(s), {dense(gate, s), dense(x, s)});
}

mx::array layer_norm(
    const mx::array& x, const std::optional<mx::array>& weight,
    const std::optional<mx::array>& bias, float eps, mx::StreamOrDevice s_) {
  auto s = mx::to_stream(s_);
  Validator v("layer_norm");
  v.require(x.ndim() > 0, "x", "an array with at least one axis", "a scalar");
  v.floating(x, "x");
  v.require(std::isfinite(eps) && eps >= 0, "eps", "finite and at least 0", eps);
  Arrays inputs{dense(x, s)};
  auto add = [&](const std::optional<mx::array>& a, const char* what) {
    if (a) {
      v.shape(*a, what, {x.shape(-1)});
      v.same_dtype(*a, what, x, "x");
      inputs.push_back(dense(*a, s));
    }
  };
  add(weight, "weight");
  add(bias, "bias");
  auto node = std::make_shared<LayerNorm>(s, eps, bool(weight));
  return mx::array(x.shape(), x.dtype(), std::move(node), std::move(inputs));
}

mx::array gelu(const mx::array& x, const std::string& approximation, mx::StreamOrDevice s_) {
  auto s = mx::to_stream(s_);
  Validator v("gelu");
  v.floating(x, "x");
  static const std::map<std::string, GeluKind> kinds{
      {"none", GeluKind::none}, {"tanh", GeluKind::tanh}, {"fast", GeluKind::fast}};
  auto kind = kinds.find(approximation);
  v.require(kind != kinds.end(), "approximation", "'none', 'tanh' or 'fast'", approximation);
  return mx::array(x.shape(), x.dtype(), std::make_shared<Gelu>(s, kind->second), {dense(x, s)});
}

mx::array clipped_swiglu(
    const mx::array& gate, const mx::array& x, float alpha, float limit, mx::StreamOrDevice s_) {
  auto s = mx::to_stream(s_);
  Validator v("clipped_swiglu");
  v.floating(gate, "gate");
  v.same_dtype(x, "x", gate, "gate");
  v.same_shape(x, "x", gate, "gate");
  v.require(std::isfinite(alpha), "alpha", "finite", alpha);
  v.require(limit > 0, "limit", "above 0", limit);
  return mx::array(
      gate.shape(), gate.dtype(), std::make_shared<ClippedSwiglu>(s, alpha, limit),
      {dense(gate, s), dense(x, s)});
}

std::tuple<mx::array, mx::array, mx::array> greedy_tokens(
    const mx::array& logits, mx::StreamOrDevice s_) {
  auto s = mx::to_stream(s_);
  Validator v("greedy_tokens");
  v.shape(logits, "logits", {-1, -1});
  v.floating(logits, "logits");
  v.require(logits.shape(1) > 0, "vocab_size", "at least 1", logits.shape(1));
  mx::Shape rows{logits.shape(0)};
  auto out = mx::array::make_arrays(
      {rows, rows, rows}, {mx::int32, mx::float32, mx::int32}, std::make_shared<GreedyTokens>(s),
      {logits});
  return {out[0], out[1], out[2]};
}

mx::array draw_tokens(
    const mx::array& logits, const mx::array& tokens, const mx::array& largest,
    const mx::array& temperature, const mx::array& keys, const mx::array& thresholds,
    mx::StreamOrDevice s_) {
  auto s = mx::to_stream(s_);
  Validator v("draw_tokens");
  v.shape(logits, "logits", {-1, -1});
  v.floating(logits, "logits");
  v.require(logits.shape(1) > 0, "vocab_size", "at least 1", logits.shape(1));
  int num_rows = logits.shape(0);
  v.shape(tokens, "tokens", {num_rows});
  v.int32(tokens, "tokens");
  v.shape(keys, "keys", {num_rows, 2});
  v.require(keys.dtype() == mx::uint32, "keys", "uint32", keys.dtype());
  auto per_row = [&](const mx::array& numbers, const char* name) {
    v.shape(numbers, name, {num_rows});
    v.require(numbers.dtype() == mx::float32, name, "float32", numbers.dtype());
  };
  per_row(largest, "largest");
  per_row(temperature, "temperature");
  per_row(thresholds, "thresholds");
  return mx::array(
      {num_rows}, mx::int32, std::make_shared<DrawTokens>(s),
      {logits, tokens, largest, temperature, keys, thresholds});
}

mx::array sampling_thresholds(
    const mx::array& logits, const mx::array& largest, const mx::array& temperature,
    const mx::array& floors, const mx::array& top_k, const mx::array& top_p,
    mx::StreamOrDevice s_) {
  constexpr int kMaxVocabSize = 1 << 23;  // metal/thresholds.h adds probabilities in 64 bits
  auto s = mx::to_stream(s_);
  Validator v("sampling_thresholds");
  v.shape(logits, "logits", {-1, -1});
  v.floating(logits, "logits");
  v.require(
      logits.shape(1) > 0 && logits.shape(1) <= kMaxVocabSize, "vocab_size",
      "in [1, " + std::to_string(kMaxVocabSize) + "]", logits.shape(1));
  int num_rows = logits.shape(0);
  auto require_column = [&](const mx::array& column, const char* what) {
    v.shape(column, what, {num_rows});
    v.require(column.dtype() == mx::float32, what, "float32", column.dtype());
  };
  require_column(largest, "largest");
  require_column(temperature, "temperature");
  require_column(floors, "floors");
  v.shape(top_k, "top_k", {num_rows});
  v.int32(top_k, "top_k");
  require_column(top_p, "top_p");
  return mx::array(
      {num_rows}, mx::float32, std::make_shared<SamplingThresholds>(s),
      {dense(logits, s), dense(largest, s), dense(temperature, s), dense(floors, s),
       dense(top_k, s), dense(top_p, s)});
}

// Leaves weights that would have to be made dense in every step to MLX.
bool served_on_cpu(
    const mx::array& x, const mx::array& weight, const std::optional<mx::array>& bias,
    int by_rows) {
  auto is_float = [](const mx::array& a) { return a.dtype() == mx::float32; };
  // Without a BLAS, MLX's own product is as fast for float32 weights.
  return (by_rows || cpu::find_sgemm() || !is_float(weight)) && is_float(x) &&
         is_supported(weight.dtype()) && (!bias || is_float(*bias)) && is_dense(weight) &&
         weight.size() > 0;
}

mx::array linear(
    const mx::array& x, const mx::array& weight, const std::optional<mx::array>& bias,
    const std::string& activations, int by_rows, mx::StreamOrDevice s_) {
  auto s = mx::to_stream(s_);
  Validator v("linear");
  auto rounded = activations_named(v, activations);
  v.shape(weight, "weight", {-1, -1});
  v.require(
      x.ndim() > 0 && x.shape(-1) == weight.shape(1), "the last axis of x",
      std::to_string(weight.shape(1)) + " like weight's", x.ndim() ? x.shape(-1) : 0);
  if (bias) {
    v.shape(*bias, "bias", {weight.shape(0)});
  }
  auto shape = x.shape();
  shape.back() = weight.shape(0);
  Arrays inputs{x, weight};
  if (bias) {
    inputs.push_back(*bias);
  }
  if (int tile_rows = separate_product_tile(inputs, std::nullopt, s)) {
    auto node = std::make_shared<SeparateProduct>(s, std::nullopt, tile_rows);
    return mx::array(std::move(shape), x.dtype(), std::move(node), std::move(inputs));
  }
  bool on_cpu = s.device == mx::Device::cpu;
  if (!(on_cpu ? served_on_cpu(x, weight, bias, by_rows)
               : Linear::served_on_gpu(x, weight, bias))) {
    auto transposed = mx::transpose(weight, s);
    return bias ? mx::addmm(*bias, x, transposed, 1.0f, 1.0f, s) : mx::matmul(x, transposed, s);
  }
  auto node = std::make_shared<Linear>(s, rounded, by_rows);
  return mx::array(std::move(shape), x.dtype(), std::move(node), std::move(inputs));
}

struct Quantized {
  WeightFormat format;
  std::vector<int> bits;
  std::vector<int> group_sizes;
};

// Bits and group sizes that each mode of mx.quantize supports.
const Quantized& quantized_mode(const std::string& mode) {
  using enum WeightFormat;
  static const std::map<std::string, Quantized> modes{
      {"affine", {affine, {2, 3, 4, 5, 6, 8}, {32, 64, 128}}},
      {"mxfp4", {mxfp4, {4}, {32}}},
      {"mxfp8", {mxfp8, {8}, {32}}},
      {"nvfp4", {nvfp4, {4}, {16}}},
  };
  static const Quantized unknown{};
  auto found = modes.find(mode);
  return found == modes.end() ? unknown : found->second;
}

bool contains(const std::vector<int>& all, int one) {
  return std::find(all.begin(), all.end(), one) != all.end();
}

mx::array quantized_linear(
    const mx::array& x, const mx::array& weight, const mx::array& scales,
    const std::optional<mx::array>& biases, const std::optional<mx::array>& bias, int group_size,
    int bits, const std::string& mode, const std::string& activations, int by_rows,
    bool for_program, mx::StreamOrDevice s_) {
  auto s = mx::to_stream(s_);
  Validator v("quantized_linear");
  auto rounded = activations_named(v, activations);
  const auto& quantized = quantized_mode(mode);
  bool is_affine = quantized.format == WeightFormat::affine;
  auto is_scale = [&](const mx::array& a) {
    return is_affine ? is_supported(a.dtype()) : a.dtype() == mx::uint8;
  };
  bool on_cpu = s.device == mx::Device::cpu && !for_program;
  Arrays inputs{x, weight, scales};
  if (biases) {
    inputs.push_back(*biases);
  }
  if (bias) {
    inputs.push_back(*bias);
  }
  bool served = contains(quantized.bits, bits) && contains(quantized.group_sizes, group_size) &&
                x.ndim() > 0 && is_supported(x.dtype()) && weight.dtype() == mx::uint32 &&
                weight.ndim() == 2 && weight.size() > 0 && is_dense(weight) && is_scale(scales) &&
                is_dense(scales) && bool(biases) == is_affine &&
                (!biases || (biases->dtype() == scales.dtype() && is_dense(*biases)));
  WeightCodes codes{quantized.format, bits, group_size};
  int tile_rows = served && !for_program ? separate_product_tile(inputs, codes, s) : 0;
  served =
      served && (tile_rows || on_cpu || QuantizedLinear::served_on_gpu(inputs, codes, for_program));
  if (!served) {  // MLX checks its arguments
    auto out = mx::quantized_matmul(x, weight, scales, biases, true, group_size, bits, mode, s);
    return bias ? mx::add(out, *bias, s) : out;
  }
  int n = weight.shape(0);
  int64_t k = int64_t(weight.shape(1)) * 32 / bits;
  v.require(
      x.shape(-1) == k, "the last axis of x", std::to_string(k) + " like weight's", x.shape(-1));
  v.require(k % group_size == 0, "the last axis of x", "whole groups", k);
  v.shape(scales, "scales", {n, int(k / group_size)});
  if (biases) {
    v.shape(*biases, "biases", {n, int(k / group_size)});
  }
  if (bias) {
    v.shape(*bias, "bias", {n});
  }
  auto shape = x.shape();
  shape.back() = n;
  if (tile_rows) {
    auto node = std::make_shared<SeparateProduct>(s, codes, tile_rows);
    return mx::array(std::move(shape), x.dtype(), std::move(node), std::move(inputs));
  }
  if (!on_cpu) {
    return mx::array(
        std::move(shape), x.dtype(), std::make_shared<QuantizedLinear>(s, codes, rounded, by_rows),
        std::move(inputs));
  }
  auto dtype = mx::promote_types(x.dtype(), is_affine ? scales.dtype() : x.dtype());
  dtype = bias ? mx::promote_types(dtype, bias->dtype()) : dtype;
  inputs[0] = mx::astype(x, mx::float32, s);
  if (bias) {
    inputs.back() = mx::astype(*bias, mx::float32, s);
  }
  mx::array out(
      std::move(shape), mx::float32, std::make_shared<QuantizedLinear>(s, codes, rounded, by_rows),
      std::move(inputs));
  return mx::astype(out, dtype, s);
}

// Checks weights [..., n, k], quantized or not, and appends them to the inputs. Returns their
// packing and k.
std::pair<WeightCodes, int> add_weights(
    const Validator& v, const mx::array& weight, const std::optional<mx::array>& scales,
    const std::optional<mx::array>& biases, int group_size, int bits, const std::string& mode,
    Arrays& inputs) {
  inputs.push_back(weight);
  if (!scales) {
    v.floating(weight, "weight");
    v.require(!biases, "biases", "None without scales", "an array");
    return {kDenseWeight, weight.shape(-1)};
  }
  const auto& quantized = quantized_mode(mode);
  v.require(
      contains(quantized.bits, bits) && contains(quantized.group_sizes, group_size), "mode",
      "a format of mx.quantize",
      mode + ", " + std::to_string(bits) + " bits in groups of " + std::to_string(group_size));
  v.require(weight.dtype() == mx::uint32, "weight", "uint32", weight.dtype());
  int64_t k = int64_t(weight.shape(-1)) * 32 / bits;
  v.require(k % group_size == 0, "weight", "of whole groups", k);
  auto shape = weight.shape();
  shape.back() = int(k / group_size);
  v.require(scales->shape() == shape, "the shape of scales", shape, scales->shape());
  inputs.push_back(*scales);
  if (quantized.format == WeightFormat::affine) {
    v.floating(*scales, "scales");
    v.require(bool(biases), "biases", "an array", "None");
    v.require(biases->shape() == shape, "the shape of biases", shape, biases->shape());
    v.same_dtype(*biases, "biases", *scales, "scales");
    inputs.push_back(*biases);
  } else {
    v.require(scales->dtype() == mx::uint8, "scales", "uint8", scales->dtype());
    v.require(!biases, "biases", "None for " + mode, "an array");
  }
  return {{quantized.format, bits, group_size}, int(k)};
}

mx::array lookup(
    const mx::array& ids, const mx::array& weight, const std::optional<mx::array>& scales,
    const std::optional<mx::array>& biases, int group_size, int bits, const std::string& mode,
    bool for_program, mx::StreamOrDevice s_) {
  auto s = mx::to_stream(s_);
  Validator v("lookup");
  v.require(
      ids.dtype() == mx::int32 || ids.dtype() == mx::uint32, "ids", "int32 or uint32", ids.dtype());
  v.shape(weight, "weight", {-1, -1});
  v.require(
      for_program || s.device == mx::Device::cpu, "stream", "the CPU's unless for_program",
      "a GPU's");
  Arrays inputs{ids};
  auto [codes, k] = add_weights(v, weight, scales, biases, group_size, bits, mode, inputs);
  auto shape = ids.shape();
  shape.push_back(k);
  // A GPU's rows have the dtype that mx.dequantize gives them.
  auto dtype = !for_program                           ? mx::float32
               : !scales                              ? weight.dtype()
               : codes.format == WeightFormat::affine ? scales->dtype()
                                                      : mx::bfloat16;
  return mx::array(std::move(shape), dtype, std::make_shared<Lookup>(s, codes), std::move(inputs));
}

mx::array lora(
    const mx::array& base, const mx::array& x, const mx::array& adapters, const mx::array& a,
    const mx::array& b, mx::StreamOrDevice s_) {
  auto s = mx::to_stream(s_);
  Validator v("lora");
  v.floating(a, "a");
  v.require(base.ndim() > 1, "base", "of at least two axes", base.shape());
  v.shape(a, "a", {-1, -1, x.shape(-1)});
  v.shape(b, "b", {a.shape(0), a.shape(1), base.shape(-1)});
  v.same_dtype(b, "b", a, "a");
  v.same_dtype(x, "x", base, "base");
  if (s.device == mx::Device::gpu) {
    v.same_dtype(a, "a", x, "x");
    v.require(
        x.shape(-1) * x.itemsize() % 16 == 0, "x", "of rows of a multiple of 16 bytes", x.shape());
  }
  int rows = base.shape(0);
  v.shape(adapters, "adapters", {rows});
  v.int32(adapters, "adapters");
  v.require(
      int64_t(base.size()) == int64_t(rows) * base.shape(-1) &&
          int64_t(x.size()) == int64_t(rows) * x.shape(-1),
      "x", "one vector for each adapter, like base", x.shape());
  return mx::array(
      base.shape(), base.dtype(), std::make_shared<Lora>(s), {base, x, adapters, a, b});
}

mx::array expert_linear(
    const mx::array& x, const mx::array& indices, const mx::array& weight,
    const std::optional<mx::array>& scales, const std::optional<mx::array>& biases,
    const std::optional<mx::array>& bias, const std::optional<mx::array>& global_scale,
    int group_size, int bits, const std::string& mode, bool for_program, mx::StreamOrDevice s_) {
  auto s = mx::to_stream(s_);
  Validator v("expert_linear");
  if (for_program) {
    v.floating(x, "x");
  } else {
    v.require(s.device == mx::Device::cpu, "stream", "the CPU's", "a GPU's");
    v.require(x.dtype() == mx::float32, "x", "float32", x.dtype());
  }
  v.require(
      indices.dtype() == mx::int32 || indices.dtype() == mx::uint32, "indices", "int32 or uint32",
      indices.dtype());
  v.shape(weight, "weight", {-1, -1, -1});
  v.require(
      weight.size() > 0 && int64_t(weight.shape(0)) * weight.shape(1) <= INT32_MAX, "weight",
      "of at least one row and at most 2^31 - 1", weight.shape());
  Arrays weights;
  auto [codes, k] = add_weights(v, weight, scales, biases, group_size, bits, mode, weights);
  v.require(
      x.ndim() >= 2 && x.shape(-1) == k && x.shape(-2) == 1, "the last axes of x",
      "1 and " + std::to_string(k) + " like weight's", x.shape());
  if (bias) {
    v.shape(*bias, "bias", {weight.shape(0), weight.shape(1)});
    weights.push_back(mx::astype(*bias, x.dtype(), s));
  }
  if (global_scale) {
    v.shape(*global_scale, "global_scale", {weight.shape(0)});
    v.require(
        codes.format == WeightFormat::nvfp4, "global_scale", "None except for nvfp4", "an array");
    // The format's largest value times its largest scale.
    auto factors = mx::divide(
        mx::astype(*global_scale, mx::float32, s), mx::array(6.0f * 448.0f, mx::float32), s);
    weights.push_back(factors);
  }
  // Rows of x match the indices one to one, or all indices of the last axis share a row.
  mx::Shape rows(x.shape().begin(), x.shape().end() - 2);
  auto shape = mx::broadcast_shapes(rows, indices.shape());
  v.require(!shape.empty(), "indices", "an array with at least one axis", "a scalar");
  v.require(
      mx::array(shape, mx::uint32, nullptr, {}).size() <= INT32_MAX, "indices", "at most 2^31 - 1",
      shape);
  rows.insert(rows.begin(), shape.size() - rows.size(), 1);
  auto shared = shape;
  shared.back() = 1;
  auto x_shape = rows == shared ? shared : shape;
  x_shape.insert(x_shape.end(), {1, k});
  Arrays inputs{
      mx::broadcast_to(x, x_shape, s),
      mx::astype(mx::broadcast_to(indices, shape, s), mx::uint32, s)};
  inputs.insert(inputs.end(), weights.begin(), weights.end());
  shape.insert(shape.end(), {1, weight.shape(1)});
  return mx::array(
      std::move(shape), x.dtype(), std::make_shared<ExpertLinear>(s, codes, bool(bias)),
      std::move(inputs));
}

mx::array expert_lora(
    const mx::array& base, const mx::array& x, const mx::array& adapters, const mx::array& experts,
    const mx::array& a, const mx::array& b, mx::StreamOrDevice s_) {
  auto s = mx::to_stream(s_);
  Validator v("expert_lora");
  v.require(s.device == mx::Device::cpu, "stream", "the CPU's", "a GPU's");
  v.require(base.dtype() == mx::float32, "base", "float32", base.dtype());
  v.require(x.dtype() == mx::float32, "x", "float32", x.dtype());
  v.require(
      experts.dtype() == mx::int32 || experts.dtype() == mx::uint32, "experts", "int32 or uint32",
      experts.dtype());
  v.require(experts.ndim() > 0, "experts", "an array with at least one axis", "a scalar");
  v.require(x.ndim() >= 2 && x.shape(-2) == 1, "x", "[..., 1, k]", x.shape());
  v.shape(a, "a", {-1, -1, -1, x.shape(-1)});
  auto shape = experts.shape();
  shape.insert(shape.end(), {1, base.ndim() ? base.shape(-1) : 0});
  v.require(base.shape() == shape, "the shape of base", shape, base.shape());
  v.shape(b, "b", {a.shape(0), a.shape(1), a.shape(2), base.shape(-1)});
  v.floating(a, "a");
  v.same_dtype(b, "b", a, "a");
  v.require(
      a.size() > 0 && int64_t(a.shape(0)) * a.shape(1) <= INT32_MAX && experts.size() <= INT32_MAX,
      "a", "of at least one matrix and at most 2^31 - 1", a.shape());
  int top_k = experts.shape(-1);
  v.shape(adapters, "adapters", {top_k ? int(experts.size() / top_k) : 0});
  v.int32(adapters, "adapters");
  // Experts have a row of x each, or all experts of the last axis share one.
  mx::Shape rows(x.shape().begin(), x.shape().end() - 2);
  auto shared = experts.shape();
  shared.back() = 1;
  v.require(
      rows == experts.shape() || rows == shared, "x", "one vector for each expert or row",
      x.shape());
  return mx::array(
      base.shape(), mx::float32, std::make_shared<ExpertLora>(s),
      {base, x, adapters, mx::astype(experts, mx::uint32, s), a, b});
}

// weight, scales, biases, bias, group size, bits, mode: ExpertWeights in layer_ops.py.
using ExpertWeights = std::tuple<
    mx::array, mx::array, std::optional<mx::array>, std::optional<mx::array>, int, int,
    std::string>;

struct CheckedExperts {
  WeightCodes codes;
  int num_experts;
  int n;
  int k;
  bool has_bias;
};

// Checks the weights of experts and appends them to the inputs.
CheckedExperts add_experts(const Validator& v, const ExpertWeights& weights, Arrays& inputs) {
  const auto& [weight, scales, biases, bias, group_size, bits, mode] = weights;
  v.shape(weight, "weight", {-1, -1, -1});
  v.require(
      weight.size() > 0 && int64_t(weight.shape(0)) * weight.shape(1) <= INT32_MAX, "weight",
      "of at least one row and at most 2^31 - 1", weight.shape());
  auto [codes, k] = add_weights(v, weight, scales, biases, group_size, bits, mode, inputs);
  if (bias) {
    v.shape(*bias, "bias", {weight.shape(0), weight.shape(1)});
    inputs.push_back(*bias);
  }
  return {codes, weight.shape(0), weight.shape(1), k, bool(bias)};
}

void check_experts(const Validator& v, const mx::array& experts) {
  v.require(
      experts.dtype() == mx::int32 || experts.dtype() == mx::uint32, "experts", "int32 or uint32",
      experts.dtype());
}

// Returns nothing if no kernel serves the product.
std::optional<mx::array> sorted_expert_linear(
    const mx::array& x, const mx::array& experts, const ExpertWeights& weights,
    mx::StreamOrDevice s_) {
  auto s = mx::to_stream(s_);
  Validator v("sorted_expert_linear");
  v.floating(x, "x");
  check_experts(v, experts);
  Arrays inputs{x, mx::astype(experts, mx::uint32, s)};
  auto of = add_experts(v, weights, inputs);
  v.shape(x, "x", {-1, of.k});
  v.shape(experts, "experts", {x.shape(0)});
  if (s.device == mx::Device::cpu ||
      !SortedExpertLinear::served_on_gpu(inputs, of.codes, of.has_bias)) {
    return std::nullopt;
  }
  return mx::array(
      {x.shape(0), of.n}, x.dtype(), std::make_shared<SortedExpertLinear>(s, of.codes, of.has_bias),
      std::move(inputs));
}

// Returns nothing if no kernel serves the products.
std::optional<mx::array> expert_glu(
    const mx::array& x, const mx::array& experts, const ExpertWeights& gate,
    const ExpertWeights& up, const ExpertWeights& down, mx::StreamOrDevice s_) {
  auto s = mx::to_stream(s_);
  Validator v("expert_glu");
  v.floating(x, "x");
  check_experts(v, experts);
  v.shape(x, "x", {-1, -1});
  v.shape(experts, "experts", {x.shape(0), -1});
  auto of_pairs = mx::astype(mx::flatten(experts, s), mx::uint32, s);
  auto pairs = mx::argsort(of_pairs, s);
  Arrays inputs{x, pairs, mx::take(of_pairs, pairs, s)};
  auto of_gate = add_experts(v, gate, inputs);
  auto of_up = add_experts(v, up, inputs);
  auto of_down = add_experts(v, down, inputs);
  auto shape_of = [](const CheckedExperts& of) { return mx::Shape{of.num_experts, of.n, of.k}; };
  v.require(
      shape_of(of_up) == shape_of(of_gate), "the experts, rows and columns of up",
      shape_of(of_gate), shape_of(of_up));
  v.shape(x, "x", {-1, of_gate.k});
  v.require(
      of_down.num_experts == of_gate.num_experts && of_down.k == of_gate.n,
      "the experts and columns of down", mx::Shape{of_gate.num_experts, of_gate.n},
      mx::Shape{of_down.num_experts, of_down.k});
  ExpertGlu::Formats formats{of_gate.codes, of_down.codes, of_gate.has_bias, of_down.has_bias};
  if (s.device == mx::Device::cpu || of_up.codes != of_gate.codes ||
      of_up.has_bias != of_gate.has_bias || pairs.size() == 0 ||
      !ExpertGlu::served_on_gpu(inputs, formats)) {
    return std::nullopt;
  }
  mx::array out(
      {pairs.shape(0), of_down.n}, x.dtype(), std::make_shared<ExpertGlu>(s, formats),
      std::move(inputs));
  return mx::reshape(out, {experts.shape(0), experts.shape(1), of_down.n}, s);
}

}  // namespace

void SortedExpertLinear::eval_cpu(const Arrays&, Arrays&) {
  throw std::logic_error("[sorted_expert_linear] runs on GPUs only");
}

void ExpertGlu::eval_cpu(const Arrays&, Arrays&) {
  throw std::logic_error("[expert_glu] runs on GPUs only");
}

Arrays QuantizedLinear::vjp(
    const Arrays& primals, const Arrays& cotangents, const std::vector<int>& argnums,
    const Arrays&) {
  int bias = has_biases() ? 4 : 3;
  Arrays out;
  for (int arg : argnums) {
    if (arg == 0) {
      auto biases = has_biases() ? std::optional(primals[3]) : std::nullopt;
      out.push_back(
          mx::quantized_matmul(
              cotangents[0], primals[1], primals[2], biases, false, codes_.group_size, codes_.bits,
              name_of(codes_.format), stream()));
    } else if (arg == bias) {
      auto rows = mx::reshape(cotangents[0], {-1, cotangents[0].shape(-1)}, stream());
      out.push_back(mx::sum(rows, 0, false, stream()));
    } else {
      throw std::invalid_argument(
          "[quantized_linear] quantized weights, scales and biases have no gradient");
    }
  }
  return out;
}

std::pair<Arrays, std::vector<int>> QuantizedLinear::vmap(
    const Arrays& inputs, const std::vector<int>& axes) {
  for (size_t i = 1; i < axes.size(); i++) {
    if (axes[i] >= 0) {
      throw std::invalid_argument("[quantized_linear] vmap supports x only");
    }
  }
  Arrays moved = inputs;
  moved[0] = mx::moveaxis(inputs[0], axes[0], 0, stream());
  auto shape = output_shapes(moved)[0];
  if (stream().device != mx::Device::cpu &&
      !served_on_gpu(moved, codes_, false)) {  // mapping adds rows
    auto biases = has_biases() ? std::optional(moved[3]) : std::nullopt;
    auto out = mx::quantized_matmul(
        moved[0], moved[1], moved[2], biases, true, codes_.group_size, codes_.bits,
        name_of(codes_.format), stream());
    size_t bias = has_biases() ? 4 : 3;
    return {{moved.size() > bias ? mx::add(out, moved[bias], stream()) : out}, {0}};
  }
  auto node = std::make_shared<QuantizedLinear>(stream(), codes_, activations_, by_rows_);
  auto dtype = moved[0].dtype();
  return {{mx::array(std::move(shape), dtype, std::move(node), std::move(moved))}, {0}};
}

void Node::eval_gpu(const Arrays&, Arrays&) {
  throw std::runtime_error(
      std::string("[") + name() + "] must run on the CPU. Pass stream=mx.cpu, or use MLX's own.");
}

void bind_layer_ops(nb::module_& m) {
  m.def(
      "rope_rotations", &rope_rotations, "positions"_a, "inv_freqs"_a, nb::kw_only(), "scale"_a,
      "stream"_a = nb::none());
  m.def(
      "rope", &rope, "x"_a, "rotations"_a, nb::kw_only(), "traditional"_a, "stream"_a = nb::none());
  m.def(
      "rms_norm", &rms_norm, "x"_a, "weight"_a.none(), "eps"_a, nb::kw_only(),
      "stream"_a = nb::none());
  m.def("silu_mul", &silu_mul, "gate"_a, "x"_a, nb::kw_only(), "stream"_a = nb::none());
  m.def(
      "lora", &lora, "base"_a, "x"_a, "adapters"_a, "a"_a, "b"_a, nb::kw_only(),
      "stream"_a = nb::none());
  m.def(
      "expert_lora", &expert_lora, "base"_a, "x"_a, "adapters"_a, "experts"_a, "a"_a, "b"_a,
      nb::kw_only(), "stream"_a = nb::none());
  m.def("add_in_product", &add_in_product, "sum"_a);
  m.def("select_rows", &select_rows, "a"_a, "rows"_a, nb::kw_only(), "kept"_a, "known"_a);
  m.def(
      "product_kernels",
      [](mx::Dtype dtype, const std::string& mode, int bits, int num_rows) {
        std::optional<WeightCodes> codes;
        if (bits > 0) {
          codes = WeightCodes{quantized_mode(mode).format, bits, 0};
        }
        std::vector<std::string> names;
        for (int rows : separate_product_tiles(dtype_of(dtype), codes, num_rows)) {
          names.push_back(separate_product_kernel(dtype_of(dtype), codes, rows).host_name);
        }
        return names;
      },
      "dtype"_a, "mode"_a, "bits"_a, "num_rows"_a,
      "Host names of the kernels that can multiply this many rows outside of whole steps, best "
      "first. bits: 0 for dense weights.");

  m.def("serves_rope", &Rope::served_on_gpu, "x"_a, "rotations"_a, "traditional"_a);
  m.def("serves_silu_mul", &SiluMul::served_on_gpu, "gate"_a);
  m.def(
      "layer_norm", &layer_norm, "x"_a, "weight"_a.none(), "bias"_a.none(), "eps"_a, nb::kw_only(),
      "stream"_a = nb::none());
  m.def("gelu", &gelu, "x"_a, "approximation"_a, nb::kw_only(), "stream"_a = nb::none());
  m.def(
      "clipped_swiglu", &clipped_swiglu, "gate"_a, "x"_a, nb::kw_only(), "alpha"_a, "limit"_a,
      "stream"_a = nb::none());
  m.def("greedy_tokens", &greedy_tokens, "logits"_a, nb::kw_only(), "stream"_a = nb::none());
  m.def(
      "draw_tokens", &draw_tokens, "logits"_a, "tokens"_a, "largest"_a, "temperature"_a, "keys"_a,
      "thresholds"_a, nb::kw_only(), "stream"_a = nb::none());
  m.def(
      "sampling_thresholds", &sampling_thresholds, "logits"_a, "largest"_a, "temperature"_a,
      "floors"_a, "top_k"_a, "top_p"_a, nb::kw_only(), "stream"_a = nb::none());
  m.def(
      "linear", &linear, "x"_a, "weight"_a, "bias"_a.none(), nb::kw_only(), "activations"_a,
      "by_rows"_a, "stream"_a = nb::none());
  m.def("activations", &activations);
  m.def(
      "quantized_linear", &quantized_linear, "x"_a, "weight"_a, "scales"_a, "biases"_a.none(),
      "bias"_a.none(), nb::kw_only(), "group_size"_a, "bits"_a, "mode"_a, "activations"_a,
      "by_rows"_a, "for_program"_a, "stream"_a = nb::none());
  m.def(
      "expert_linear", &expert_linear, "x"_a, "indices"_a, "weight"_a, "scales"_a.none(),
      "biases"_a.none(), "bias"_a.none(), "global_scale"_a.none(), nb::kw_only(), "group_size"_a,
      "bits"_a, "mode"_a, "for_program"_a, "stream"_a = nb::none());
  m.def(
      "sorted_expert_linear", &sorted_expert_linear, "x"_a, "experts"_a, "weights"_a, nb::kw_only(),
      "stream"_a = nb::none());
  m.def(
      "expert_glu", &expert_glu, "x"_a, "experts"_a, "gate"_a, "up"_a, "down"_a, nb::kw_only(),
      "stream"_a = nb::none());
  m.def(
      "lookup", &lookup, "ids"_a, "weight"_a, "scales"_a.none(), "biases"_a.none(), nb::kw_only(),
      "group_size"_a, "bits"_a, "mode"_a, "for_program"_a, "stream"_a = nb::none());
}

}  // namespace mlx_paged
