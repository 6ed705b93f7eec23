// Copyright © 2026 the mlx_paged authors. Apache-2.0.

#include "op.h"

#include <array>
#include <string_view>
#include <unordered_map>

#include "mlx/primitives.h"

namespace mlx_paged {

namespace {

struct Row {
  std::string_view name;
  Op op;
  RowRule rows;
};

constexpr Row kTable[] = {
    // clang-format off
    {"Abs", Op::abs, RowRule::elementwise},
    {"Add", Op::add, RowRule::elementwise},
    {"AsType", Op::as_type, RowRule::elementwise},
    {"Copy", Op::copy, RowRule::elementwise},
    {"Divide", Op::divide, RowRule::elementwise},
    {"Erf", Op::erf, RowRule::elementwise},
    {"Exp", Op::exp, RowRule::elementwise},
    {"Maximum", Op::maximum, RowRule::elementwise},
    {"Minimum", Op::minimum, RowRule::elementwise},
    {"Multiply", Op::multiply, RowRule::elementwise},
    {"Negative", Op::negative, RowRule::elementwise},
    {"Power", Op::power, RowRule::elementwise},
    {"Rsqrt", Op::rsqrt, RowRule::elementwise},
    {"Sigmoid", Op::sigmoid, RowRule::elementwise},
    {"Sqrt", Op::sqrt, RowRule::elementwise},
    {"Square", Op::square, RowRule::elementwise},
    {"StopGradient", Op::stop_gradient, RowRule::elementwise},
    {"Subtract", Op::subtract, RowRule::elementwise},
    {"Tanh", Op::tanh, RowRule::elementwise},
    {"Broadcast", Op::broadcast, RowRule::broadcast},
    {"ExpandDims", Op::expand_dims, RowRule::reshape},
    {"Flatten", Op::flatten, RowRule::reshape},
    {"Reshape", Op::reshape, RowRule::reshape},
    {"Squeeze", Op::squeeze, RowRule::reshape},
    {"Unflatten", Op::unflatten, RowRule::reshape},
    {"Slice", Op::slice, RowRule::slice},
    {"Split", Op::split, RowRule::split},
    {"Transpose", Op::transpose, RowRule::transpose},
    {"AddMM", Op::add_mm, RowRule::product_sum},
    {"ArgPartition", Op::arg_partition, RowRule::dependent},
    {"Concatenate", Op::concatenate, RowRule::concatenate},
    {"Depends", Op::depends, RowRule::dependent},
    {"Gather", Op::gather, RowRule::dependent},
    {"GatherAxis", Op::gather_axis, RowRule::dependent},
    {"LayerNorm", Op::mlx_layer_norm, RowRule::first},
    {"MaskedScatter", Op::masked_scatter, RowRule::dependent},
    {"Matmul", Op::matmul, RowRule::product},
    {"Quantize", Op::dequantize, RowRule::dependent},
    {"QuantizedMatmul", Op::quantized_matmul, RowRule::product},
    {"RMSNorm", Op::mlx_rms_norm, RowRule::first},
    {"RoPE", Op::mlx_rope, RowRule::first_two},
    {"Softmax", Op::softmax, RowRule::dependent},
    {"Sum", Op::sum, RowRule::dependent},
    {"AllGather", Op::all_gather, RowRule::dependent},
    {"Sum AllReduce", Op::all_reduce, RowRule::elementwise},
    {"clipped_swiglu", Op::clipped_swiglu, RowRule::elementwise},
    {"expert_linear", Op::expert_linear, RowRule::dependent},
    {"expert_lora", Op::expert_lora, RowRule::dependent},
    {"gelu", Op::gelu, RowRule::elementwise},
    {"greedy_tokens", Op::greedy_tokens, RowRule::dependent},
    {"layer_norm", Op::layer_norm, RowRule::first},
    {"linear", Op::linear, RowRule::first},
    {"lookup", Op::lookup, RowRule::dependent},
    {"lora", Op::lora, RowRule::first_three},
    {"paged_attention", Op::paged_attention, RowRule::dependent},
    {"peer_sum", Op::peer_sum, RowRule::first},
    {"quantized_linear", Op::quantized_linear, RowRule::first},
    {"rms_norm", Op::rms_norm, RowRule::first},
    {"rope", Op::rope, RowRule::first_two},
    {"rope_rotations", Op::rope_rotations, RowRule::dependent},
    {"silu_mul", Op::silu_mul, RowRule::elementwise},
    {"write_kv", Op::write_kv, RowRule::dependent},
    // clang-format on
};

// True for a compiled function that is a single addition, possibly of broadcast inputs. Its name
// lists its operations.
bool only_adds(const mx::array& compiled) {
  constexpr std::string_view kCompiled = "Compiled", kBroadcast = "Broadcast";
  std::string_view name = compiled.primitive().name();
  name.remove_prefix(name.starts_with(kCompiled) ? kCompiled.size() : 0);
  while (name.starts_with(kBroadcast)) {
    name.remove_prefix(kBroadcast.size());
  }
  return name == "Add" && compiled.inputs().size() == 2;
}

}  // namespace

Op op_of(const mx::array& a) {
  static const auto ops = [] {
    std::unordered_map<std::string_view, Op> made;
    for (const auto& row : kTable) {
      made.emplace(row.name, row.op);
    }
    return made;
  }();
  const auto& primitive = a.primitive();
  if (auto found = ops.find(primitive.name()); found != ops.end()) {
    return found->second;
  }
  if (dynamic_cast<const mx::Compiled*>(&primitive)) {
    return only_adds(a) ? Op::add : Op::compiled;
  }
  return Op::foreign;
}

RowRule row_rule(Op op) {
  static const auto rules = [] {
    std::array<RowRule, size_t(Op::foreign) + 1> made;
    made.fill(RowRule::dependent);
    made[size_t(Op::compiled)] = RowRule::elementwise;
    for (const auto& row : kTable) {
      made[size_t(row.op)] = row.rows;
    }
    return made;
  }();
  return rules[size_t(op)];
}

bool is_reshape(Op op) {
  return row_rule(op) == RowRule::reshape;
}

bool is_view(Op op) {
  return is_reshape(op) || op == Op::transpose || op == Op::slice || op == Op::split;
}

bool is_collective(Op op) {
  return op == Op::all_gather || op == Op::all_reduce;
}

}  // namespace mlx_paged
